"""An RL environment of several turns: the model guesses a number, and gets "Higher." or "Lower." after each guess.

tinsmith train rl --config run.yaml --environment guessing:environment
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinsmith.training import from_games

START_TOKEN, HIGHER_TOKEN, LOWER_TOKEN = 10, 11, 12
"""The prompts of a game without a renderer, as tokens."""
NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True, slots=True)
class Secret:
    """A number from 1 to `highest`, and the number of guesses that the model has."""

    number: int
    highest: int
    guesses: int


def environment(*, renderer: Renderer | None, group_size: int, count: int, seed: int) -> list[EnvGroupBuilder]:
    """Return `count` groups of games.

    `tinsmith train rl` calls this function for `environment: guessing:environment`.
    """
    return guessing(secrets(seed, count), group_size=group_size, renderer=renderer)


def guessing(hidden: Sequence[Secret], *, group_size: int, renderer: Renderer | None = None) -> list[EnvGroupBuilder]:
    """Return one group of games for each secret.

    The reward is 1 if the first guess is right. Each wrong guess costs 1 / `guesses`, so the reward is 0 if no guess is
    right. With a renderer, the game is played in words. Without a renderer, the game is played in tokens: the remainder
    of the answer's first token is the guess, so even a random model can learn. The metric `env/all/found` is the
    fraction of games that find the number.
    """
    wording = IN_TOKENS if renderer is None else IN_WORDS
    return from_games(hidden, Game(wording), group_size=group_size, renderer=renderer, tags=["guessing"])


def secrets(seed: int, count: int, *, highest: int = 7, guesses: int = 3) -> list[Secret]:
    """Return `count` secrets. The same seed gives the same secrets.

    Numbers in the middle are more frequent, because a model learns frequencies sooner than the meaning of "Higher." and
    "Lower.". A binary search always succeeds if `guesses` is log2(highest + 1) or more.
    """
    generator = random.Random(seed)
    numbers = [1 + int(generator.triangular(0, highest - 1e-9)) for _ in range(count)]
    return [Secret(number, highest, guesses) for number in numbers]


@dataclass(frozen=True, slots=True)
class Wording:
    """The prompts of a game, and a function that reads a guess.

    The function returns None for an answer without a number.
    """

    start: Callable[[Secret], Any]
    higher: Any
    lower: Any
    read: Callable[[Any, Secret], int | None]


@dataclass(frozen=True, slots=True)
class Game:
    """A game as a generator, which yields prompts, receives answers, and returns the reward with metrics."""

    wording: Wording

    def __call__(self, secret: Secret) -> Generator[Any, Any, tuple[float, dict[str, float]]]:
        prompt = self.wording.start(secret)
        for wrong_guesses in range(secret.guesses):
            guess = self.wording.read((yield prompt), secret)
            if guess == secret.number:
                return 1 - wrong_guesses / secret.guesses, {"found": 1.0}
            prompt = self.wording.lower if guess is not None and guess > secret.number else self.wording.higher
        return 0.0, {"found": 0.0}


def _start_in_words(secret: Secret) -> str:
    return f"I think of a number from 1 to {secret.highest}. You have {secret.guesses} guesses. Say one number."


def _guess_in_words(answer: str, secret: Secret) -> int | None:
    found = NUMBER.search(answer)
    return int(found.group()) if found else None


def _start_in_tokens(secret: Secret) -> list[int]:
    return [START_TOKEN]


def _guess_in_tokens(answer: Sequence[int], secret: Secret) -> int | None:
    return answer[0] % secret.highest + 1 if answer else None


IN_WORDS = Wording(_start_in_words, "Higher.", "Lower.", _guess_in_words)
IN_TOKENS = Wording(_start_in_tokens, [HIGHER_TOKEN], [LOWER_TOKEN], _guess_in_tokens)
