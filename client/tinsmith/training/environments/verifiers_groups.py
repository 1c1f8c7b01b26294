"""Groups of a `verifiers` environment. The environment is not modified, and calls a stand-in for OpenAI's client.

Each request of a rollout becomes an observation, and the answer of the training loop is returned as a completion. Any
training loop for tinker-cookbook's groups can therefore train in a `verifiers` environment, with the loop's own
weights, temperature and limits. Sampling settings of the environment, such as a temperature, are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import tinker
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.types import (
    Action,
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Metrics,
    Observation,
    StepResult,
    Trajectory,
)
from typing_extensions import override

from tinsmith.training.errors import EnvironmentFailed

OF_A_ROLLOUT = ("prompt", "answer", "task", "info", "example_id")
"""The columns of the dataset that verifiers passes to a rollout."""
_envs_of_group: ContextVar[tuple[VerifiersEnv, ...]] = ContextVar("envs_of_group", default=())
"""The environments of the current group.

A builder may run several groups at the same time, and each clean-up concerns only one group.
"""


def from_verifiers(
    environment: Any, renderer: Renderer, *, group_size: int, examples: int = -1, seed: int | None = None
) -> list[EnvGroupBuilder]:
    """Return a group of `group_size` rollouts for each training example, or for the first `examples` training examples.

    `environment` is the result of `verifiers.load_environment` (0.1.9). `seed` shuffles the examples. `renderer`
    converts prompts to tokens, and the renderer's tokenizer decodes completions that are not chats.
    """
    data = environment.get_dataset(n=examples, seed=seed)
    columns = [name for name in OF_A_ROLLOUT if name in data.column_names]
    rows = [{name: row[name] for name in columns} for row in data]
    return [VerifiersGroupBuilder(environment, renderer, row, group_size) for row in rows]


@dataclass(frozen=True, slots=True)
class VerifiersGroupBuilder(EnvGroupBuilder):
    """A group of rollouts for one row of data. The row has the columns in OF_A_ROLLOUT."""

    environment: Any
    renderer: Renderer
    row: Mapping[str, Any]
    group_size: int

    @override
    async def make_envs(self) -> Sequence[Env]:
        envs = [VerifiersEnv(self.environment, self.renderer, self.row) for _ in range(self.group_size)]
        _envs_of_group.set((*_envs_of_group.get(), *envs))
        return envs

    @override
    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """Return the rewards that the environment's rubric gives. The rubric may compare the rollouts of the group."""
        states = [env.final_state() for env in env_group if isinstance(env, VerifiersEnv)]
        if self.environment.score_rollouts:
            await self.environment.rubric.score_group(states, score_sem=nullcontext())
        else:
            await self.environment.rubric.dummy_score_group(states)
        return [(float(state["reward"]), dict(state["metrics"] or {})) for state in states]

    @override
    def logging_tags(self) -> list[str]:
        return [str(self.row["task"])] if self.row.get("task") else []

    @override
    async def cleanup(self) -> None:
        """Cancel the rollouts that will not get further answers.

        Verifiers itself cleans up the rollouts that have ended.
        """
        for env in _envs_of_group.get():
            env.cancel()
        _envs_of_group.set(())


class VerifiersEnv(Env):
    """An environment for one rollout. Between two requests, the rollout runs in a separate task."""

    def __init__(self, environment: Any, renderer: Renderer, row: Mapping[str, Any]) -> None:
        self._environment = environment
        self._renderer = renderer
        self._row = row
        self._requests = _Requests()
        self._rollout: asyncio.Task[Any] | None = None

    def final_state(self) -> Any:
        """Return the final state of the rollout. Raises EnvironmentFailed if the rollout has not ended."""
        if self._rollout is None or not self._rollout.done():
            raise EnvironmentFailed("a rollout of verifiers was stopped before its end, and cannot be scored")
        return self._rollout.result()

    def cancel(self) -> None:
        """Cancel the rollout if the rollout has not ended."""
        if self._rollout is not None:
            self._rollout.cancel()

    @override
    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        self._rollout = asyncio.create_task(self._rolled_out())
        request = await self._next_request()
        if request is None:
            raise EnvironmentFailed("the environment of verifiers ended a rollout before it asked for anything")
        return request.prompt, request.stop

    @override
    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        self._requests.answer(action)
        request = await self._next_request()
        return StepResult(
            reward=0.0,
            episode_done=request is None,
            next_observation=tinker.ModelInput.empty() if request is None else request.prompt,
            next_stop_condition=[] if request is None else request.stop,
        )

    async def _rolled_out(self) -> Any:
        from tinker_cookbook.recipes.verifiers_rl.tinker_openai import TinkerAsyncOpenAIClient

        client = TinkerAsyncOpenAIClient(self._requests, self._renderer, self._renderer.tokenizer)  # type: ignore[arg-type]
        return await self._environment.rollout(dict(self._row), client, "tinker", {})

    async def _next_request(self) -> _Request | None:
        """Return the next request, or None when the rollout ends. Raises the error of the rollout."""
        assert self._rollout is not None, "initial_observation comes first"
        request = asyncio.ensure_future(self._requests.next())
        try:
            await asyncio.wait([request, self._rollout], return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                return request.result()
        finally:
            request.cancel()
        error = self.final_state().get("error")
        if error is not None:
            raise error
        return None


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: tinker.ModelInput
    stop: StopCondition
    answered: asyncio.Future[list[int]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Requests:
    """A stand-in for the sampling client of the cookbook.

    The stand-in passes requests to the training loop, one at a time.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._current: _Request | None = None

    async def sample_async(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams
    ) -> SimpleNamespace:
        """Sample like the SDK's client, but return no logprobs, because the training loop has its own logprobs."""
        stop: Any = sampling_params.stop
        request = _Request(prompt, [stop] if isinstance(stop, str) else list(stop or []))
        await self._queue.put(request)
        tokens = await request.answered
        return SimpleNamespace(sequences=[SimpleNamespace(tokens=tokens, logprobs=None)])

    sample = sample_async
    """The name of the method in tinker-cookbook 0.6."""

    async def next(self) -> _Request:
        self._current = await self._queue.get()
        return self._current

    def answer(self, tokens: list[int]) -> None:
        """Answer the last request if the request was not cancelled."""
        assert self._current is not None, "a request comes first"
        if not self._current.answered.done():
            self._current.answered.set_result(tokens)
