"""An environment that calls OpenAI's client is rolled out by any policy; tests/sdk uses verifiers itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinsmith.training.environments.verifiers_groups import from_verifiers
from tinsmith.training.errors import EnvironmentFailed

pytestmark = pytest.mark.pytorch


class Letters:
    """A tokenizer by code points."""

    bos_token = eos_token_id = None
    name_or_path = "letters"

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


class Rows(list[dict[str, Any]]):
    column_names = ("prompt", "answer", "task", "example_id", "more")


class Rubric:
    async def score_group(self, states: list[dict[str, Any]], score_sem: Any) -> None:
        async with score_sem:
            for state in states:
                state["reward"] = float(state["said"].count(state["input"]["answer"]))
                state["metrics"] = {"length": len(state["said"])}


class AsksTwice:
    """An environment with the interface of verifiers that samples twice."""

    def __init__(self, requests: int = 2, error: Exception | None = None) -> None:
        self.rubric, self.score_rollouts = Rubric(), True
        self.ended: list[str] = []
        self._requests, self._error = requests, error

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Rows:
        prompt = [{"role": "user", "content": "Hi"}]
        rows = [{"prompt": prompt, "answer": "a", "task": "letters", "example_id": 0, "more": 1} for _ in range(3)]
        return Rows(rows if n < 0 else rows[:n])

    async def rollout(self, row: dict[str, Any], client: Any, model: str, sampling_args: Any) -> dict[str, Any]:
        messages, said = list(row["prompt"]), ""
        try:
            for _ in range(self._requests):
                answer = await client.chat.completions.create(model=model, messages=messages, temperature=0.1)
                text = answer.choices[0].message.content
                said += text
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More"}]
            return {"input": row, "said": said, "reward": None, "error": self._error}
        finally:
            self.ended.append(said)


class Says(TokenCompleter):
    def __init__(self, *answers: str) -> None:
        self._answers = list(answers)
        self.requests: list[str] = []

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self.requests.append("".join(map(chr, model_input.to_ints())))
        if not self._answers:
            raise ConnectionError("the server is gone")
        tokens = [ord(letter) for letter in self._answers.pop(0)]
        return TokensWithLogprobs(tokens, [-1.0] * len(tokens))


def renderer() -> Renderer:
    return get_renderer("role_colon", Letters())  # type: ignore[arg-type]


def groups_of(environment: Any, size: int = 2) -> Any:
    return from_verifiers(environment, renderer(), group_size=size)


async def test_each_request_is_answered_by_the_policy_and_scored_by_the_rubric() -> None:
    builders, policy = groups_of(AsksTwice()), Says("aa", "a", "b", "ab")
    group = await do_group_rollout(builders[0], policy)
    assert len(builders) == 3
    assert sum(group.get_total_rewards()) == 4
    assert policy.requests[0] == "User: Hi\n\nAssistant:"
    assert {len(trajectory.transitions) for trajectory in group.trajectories_G} == {2}
    said = [[len(turn.ac.tokens) for turn in each.transitions] for each in group.trajectories_G]
    assert sorted(sum(lengths) for lengths in said) == sorted(metrics["length"] for metrics in group.metrics_G)
    assert builders[0].logging_tags() == ["letters"]


async def test_an_error_of_the_environment_is_raised() -> None:
    [builder, *_] = groups_of(AsksTwice(error=RuntimeError("no sandbox")))
    with pytest.raises(RuntimeError, match="no sandbox"):
        await do_group_rollout(builder, Says(*"aaaa"))


async def test_a_rollout_without_a_request_is_reported() -> None:
    [builder, *_] = groups_of(AsksTwice(requests=0))
    with pytest.raises(EnvironmentFailed, match="before it asked for anything"):
        await do_group_rollout(builder, Says())


async def test_rollouts_without_further_answers_are_cancelled() -> None:
    environment = AsksTwice()
    [builder, *_] = groups_of(environment)
    with pytest.raises(ConnectionError, match="the server is gone"):
        await do_group_rollout(builder, Says("aa", "a"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(environment.ended) == 2


async def test_a_clean_up_ends_the_rollouts_of_its_own_group_alone() -> None:
    environment = AsksTwice()
    [builder, *_] = groups_of(environment)
    held = Held()
    other = asyncio.create_task(do_group_rollout(builder, held))
    async with asyncio.timeout(30):
        await held.is_called.wait()
    with pytest.raises(ConnectionError):
        await do_group_rollout(builder, Says("a"))
    held.may.set()
    assert (await other).get_total_rewards() == [2, 2]


class Held(Says):
    """A policy that answers when it is allowed to."""

    def __init__(self) -> None:
        super().__init__("a", "a", "a", "a")
        self.is_called, self.may = asyncio.Event(), asyncio.Event()

    async def __call__(self, *arguments: Any, **options: Any) -> TokensWithLogprobs:
        self.is_called.set()
        await self.may.wait()
        return await super().__call__(*arguments, **options)
