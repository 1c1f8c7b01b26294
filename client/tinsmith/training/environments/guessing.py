"""A worked environment of many turns: a number is guessed, and each guess hears whether to go higher or lower."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import EnvGroupBuilder

from tinsmith.training.environments.functions import from_games

START_TOKEN, HIGHER_TOKEN, LOWER_TOKEN = 10, 11, 12
"""Where the game is played in tokens."""
NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Secret:
    """A number from 1 to `highest`, for which there are `guesses`."""

    number: int
    highest: int
    guesses: int


@dataclass(frozen=True, slots=True)
class Wording:
    """What the game says, and how it reads a guess: None is no number at all."""

    start: Callable[[Secret], Any]
    higher: Any
    lower: Any
    read: Callable[[Any, Secret], int | None]


def secrets(seed: int, count: int, *, highest: int = 7, guesses: int = 3) -> list[Secret]:
    """The same ones for the same seed, the middle more often than the ends: that is learnt before what answers mean.

    Who halves what is left needs `guesses` >= log2(highest + 1).
    """
    drawn = random.Random(seed)
    return [Secret(1 + int(drawn.triangular(0, highest - 1e-9)), highest, guesses) for _ in range(count)]


def guessing(hidden: Sequence[Secret], *, group_size: int, renderer: Renderer | None = None) -> list[EnvGroupBuilder]:
    """Groups of games, one for each secret.

    The reward is the part of the guesses that the right one left, itself included: 1 for the first guess, 0 for none.
    With a renderer it is played in words; without in tokens, where a guess is the remainder of the answer's first
    token, so that each answer is a guess, also of a model that knows no language. `env/all/found` counts.
    """
    wording = IN_TOKENS if renderer is None else IN_WORDS
    return from_games(hidden, Game(wording), group_size=group_size, renderer=renderer, tags=["guessing"])


@dataclass(frozen=True, slots=True)
class Game:
    """Of one secret, as a generator."""

    wording: Wording

    def __call__(self, secret: Secret) -> Generator[Any, Any, tuple[float, dict[str, float]]]:
        said = self.wording.start(secret)
        for before in range(secret.guesses):
            guess = self.wording.read((yield said), secret)
            if guess == secret.number:
                return 1 - before / secret.guesses, {"found": 1.0}
            said = self.wording.lower if guess is not None and guess > secret.number else self.wording.higher
        return 0.0, {"found": 0.0}


def _in_words(secret: Secret) -> str:
    return f"I think of a number from 1 to {secret.highest}. You have {secret.guesses} guesses. Say one number."


def _number_in_words(answer: str, secret: Secret) -> int | None:
    found = NUMBER.search(answer)
    return int(found.group()) if found else None


def _in_tokens(secret: Secret) -> list[int]:
    return [START_TOKEN]


def _number_in_tokens(answer: Sequence[int], secret: Secret) -> int | None:
    return answer[0] % secret.highest + 1 if answer else None


IN_WORDS = Wording(_in_words, "Higher.", "Lower.", _number_in_words)
IN_TOKENS = Wording(_in_tokens, [HIGHER_TOKEN], [LOWER_TOKEN], _number_in_tokens)
