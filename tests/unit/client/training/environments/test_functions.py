"""Functions and generators as environments: their prompts, answers and rewards."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup
from tinsmith.training.environments.functions import from_functions, from_games

pytestmark = pytest.mark.pytorch


class Says(TokenCompleter):
    """A model with a fixed list of answers."""

    def __init__(self, *answers: list[int]) -> None:
        self._answers = list(answers)
        self.calls: list[tuple[list[int], StopCondition]] = []

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self.calls.append((model_input.to_ints(), stop))
        tokens = self._answers.pop(0)
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens), "length")


class Letters(Renderer):
    """A renderer that encodes a message as its letters' code points after its role's, and ends it with a 0."""

    def __init__(self) -> None:
        return

    def build_generation_prompt(self, messages: Any, *_: Any, **__: Any) -> tinker.ModelInput:
        spoken = [[1 if each["role"] == "user" else 2, *map(ord, each["content"]), 0] for each in messages]
        return tinker.ModelInput.from_ints([token for tokens in spoken for token in tokens] + [2])

    def get_stop_sequences(self) -> list[int]:
        return [0]

    def parse_response(self, response: list[int]) -> Any:
        text = "".join(map(chr, response)).rstrip("\0")
        return {"role": "assistant", "content": text}, None

    def render_message(self, *_: Any) -> Any:
        raise NotImplementedError


def words(*texts: str) -> list[int]:
    return [token for text in texts for token in map(ord, text)]


async def play(builder: Any, *answers: list[int]) -> tuple[TrajectoryGroup, Says]:
    policy = Says(*answers)
    return await do_group_rollout(builder, policy), policy


def prompt_of(example: int) -> list[int]:
    return [example, example]


async def later(example: int, answer: list[int]) -> float:
    return float(sum(answer))


def with_metrics(example: int, answer: list[int]) -> tuple[float, dict[str, float]]:
    return 0.5, {"length": float(len(answer))}


async def test_a_prompt_and_a_reward_are_a_group_for_each_example() -> None:
    builders = from_functions([4, 5], prompt_of, lambda example, answer: answer[0] - example, group_size=2)
    group, policy = await play(builders[1], [7], [9])
    assert group.get_total_rewards() == [2, 4]
    assert policy.calls == [([5, 5], []), ([5, 5], [])]


async def test_a_reward_may_be_waited_for_and_say_more() -> None:
    [slow] = from_functions([1], prompt_of, later, group_size=2)
    assert (await play(slow, [7, 1], [9]))[0].get_total_rewards() == [8, 9]
    [told] = from_functions([1], prompt_of, with_metrics, group_size=2, tags=["sums"])
    group, _ = await play(told, [7, 1], [9])
    assert [each.transitions[-1].metrics["length"] for each in group.trajectories_G] == [2, 1]
    assert told.logging_tags() == ["sums"]


def countdown(start: int) -> Generator[list[int], list[int], float]:
    total = 0.0
    for number in range(start, 0, -1):
        [answer] = yield [number]
        total += answer
    return total


async def test_a_game_has_as_many_turns_as_its_generator_and_hears_each_answer() -> None:
    [builder] = from_games([2], countdown, group_size=2)
    group, policy = await play(builder, [30], [40], [50], [60])
    assert group.get_total_rewards() == [70, 110]
    assert [prompt for prompt, _ in policy.calls] == [[2], [2, 30, 1], [2], [2, 50, 1]]


async def test_with_a_renderer_both_sides_speak_text() -> None:
    heard: list[str] = []

    def chat(name: str) -> Generator[Any, str, float]:
        heard.append((yield f"Hi {name}"))
        heard.append((yield [{"role": "user", "content": "And?"}]))
        return 1.0

    [builder] = from_games(["Bo"], chat, group_size=2, renderer=Letters())
    _, policy = await play(builder, words("yo\0"), words("so"), words("yo"), words("so"))
    assert heard == ["yo", "so", "yo", "so"]
    assert policy.calls[0] == ([1, *words("Hi Bo"), 0, 2], [0])
    assert policy.calls[1] == ([1, *words("Hi Bo"), 0, 2, *words("yo"), 0, 1, *words("And?"), 0, 2], [0])


@pytest.mark.parametrize(
    ("prompt", "renderer", "complaint"),
    [
        ("text", None, "without a renderer a prompt must be a list of tokens"),
        ([1, 2], Letters(), "must be a string or messages"),
    ],
)
async def test_a_prompt_of_the_other_kind_is_refused_with_a_sentence(
    prompt: Any, renderer: Renderer | None, complaint: str
) -> None:
    [builder] = from_functions([1], lambda _: prompt, later, group_size=2, renderer=renderer)
    with pytest.raises(TypeError, match=complaint):
        await play(builder, [1], [1])


def test_a_group_of_one_is_refused_because_its_answers_are_compared() -> None:
    with pytest.raises(ValueError, match="must be 2 or more"):
        from_functions([1], prompt_of, later, group_size=1)
