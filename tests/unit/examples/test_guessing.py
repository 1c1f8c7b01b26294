"""The example game: its answers to guesses, and its rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from guessing import (
    HIGHER_TOKEN,
    IN_TOKENS,
    IN_WORDS,
    LOWER_TOKEN,
    START_TOKEN,
    Game,
    Secret,
    Wording,
    secrets,
)

pytestmark = pytest.mark.pytorch

SECRET = Secret(number=5, highest=7, guesses=3)


def played(wording: Wording, answers: Sequence[Any], secret: Secret = SECRET) -> tuple[list[Any], float, float]:
    """Return the prompts, the reward, and 1 if the number was found."""
    game = Game(wording)(secret)
    said = [next(game)]
    for answer in answers:
        try:
            said.append(game.send(answer))
        except StopIteration as end:
            reward, metrics = end.value
            return said, reward, metrics["found"]
    raise AssertionError("the game has not ended")


@pytest.mark.parametrize(("answers", "reward"), [(["5"], 1), (["4", "5"], 2 / 3), (["4", "6", "It is 5."], 1 / 3)])
def test_the_sooner_it_is_found_the_more_is_earned(answers: list[str], reward: float) -> None:
    _, earned, found = played(IN_WORDS, answers)
    assert (earned, found) == (pytest.approx(reward), 1)


def test_a_game_without_guesses_left_has_no_reward() -> None:
    assert played(IN_WORDS, ["1", "2", "3"])[1:] == (0, 0)


def test_each_guess_gets_a_direction_and_an_answer_without_a_number_counts_as_a_guess() -> None:
    said, *_ = played(IN_WORDS, ["7", "hm", "1"])
    assert said == ["I think of a number from 1 to 7. You have 3 guesses. Say one number.", "Lower.", "Higher."]


def test_in_tokens_every_answer_is_a_guess() -> None:
    said, reward, _ = played(IN_TOKENS, [[6], [2], [4 + 7]])
    assert said == [[START_TOKEN], [LOWER_TOKEN], [HIGHER_TOKEN]]
    assert reward == pytest.approx(1 / 3)


@pytest.mark.parametrize("number", range(1, 8))
def test_bisection_always_finds_the_number(number: int) -> None:
    low, high, guesses = 1, 7, [4]
    while guesses[-1] != number:
        low, high = (guesses[-1] + 1, high) if number > guesses[-1] else (low, guesses[-1] - 1)
        guesses.append((low + high) // 2)
    said, _, found = played(IN_TOKENS, [[guess - 1] for guess in guesses], Secret(number, 7, 3))
    assert found == 1
    assert said[1:] == [[HIGHER_TOKEN] if number > guess else [LOWER_TOKEN] for guess in guesses[:-1]]


def test_secrets_are_the_same_for_the_same_seed() -> None:
    assert secrets(1, 50) == secrets(1, 50) != secrets(2, 50)
    assert {secret.number for secret in secrets(1, 200)} == set(range(1, 8))
