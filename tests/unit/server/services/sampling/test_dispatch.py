"""The answers about samples and prompts whose samplers are gone or cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import TooManySamples, Unprocessable, WorkerUnavailable, WorkerUnstartable
from tinsmith_server.fleet.base import Changes
from tinsmith_server.services.sampling import dispatch
from tinsmith_server.services.sampling.dispatch import Dispatch, Need
from tinsmith_server.services.sampling.routing import SamplerLoads
from tinsmith_server.wire.ids import SampleId, sampler_token

RENDERED = worker_pb2.RenderPromptReply()


class Sampler:
    """A sampler that renders prompts and records cancellations, or the error of each connection to it."""

    def __init__(self, error: Exception | None = None, outlives_connections: bool = False) -> None:
        self.sampler_id, self.error, self.outlives_connections = "one", error, outlives_connections
        self.cancelled: list[str] = []

    def running(self) -> Sampler | None:
        return None if self.error else self

    async def connection(self, _timeout_seconds: float) -> Sampler:
        if self.error is not None:
            raise self.error
        return self

    async def render_prompt(self, _request: object, _tenant: str) -> worker_pb2.RenderPromptReply:
        return RENDERED

    async def cancel_sample(self, request_id: str) -> None:
        self.cancelled.append(request_id)


class Samplers:
    """A fleet of these samplers."""

    problem: str | None = None

    def __init__(self, *all_samplers: Sampler) -> None:
        self.all_samplers, self.changes = all_samplers, Changes()

    def samplers(self, _base_model: str, _rank: int) -> Sequence[Sampler]:
        return self.all_samplers

    async def refresh(self) -> None:
        await asyncio.sleep(0)

    async def provide(self, base_model: str, *, rank: int, sampling: bool) -> str:
        return f"no sampler of {base_model} runs"


def dispatch_to(*samplers: Sampler) -> Dispatch:
    return Dispatch(cast(Any, Samplers(*samplers)), SamplerLoads(), cast(Any, None))


@pytest.mark.parametrize(
    ("samplers", "expected", "message"),
    [
        ([], TooManySamples, "no sampler of tiny runs"),
        ([Sampler(WorkerUnavailable("loading tiny"))], TooManySamples, "loading tiny"),
        ([Sampler(WorkerUnstartable("tiny has no config.json"))], Unprocessable, "tiny has no config.json"),
    ],
    ids=["none", "loading", "unstartable"],
)
async def test_a_prompt_that_no_sampler_renders_is_repeated_unless_the_model_cannot_start(
    samplers: list[Sampler], expected: type[Exception], message: str
) -> None:
    """The SDK repeats a request without end after a 429, and ends with a 422."""
    with pytest.raises(expected, match=message):
        await dispatch_to(*samplers).render(Need("ada", "tiny"), worker_pb2.RenderPromptRequest())


async def test_a_prompt_is_rendered_by_the_sampler_that_answers() -> None:
    samplers = Sampler(WorkerUnavailable("down")), Sampler()
    assert await dispatch_to(*samplers).render(Need("ada", "tiny"), worker_pb2.RenderPromptRequest()) is RENDERED


async def test_a_cancellation_reaches_a_sampler_that_runs_and_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "UNSEEN_SECONDS", 0.0)
    sample = SampleId("sess-1:sample:0", 3, sampler_token("one"))
    running = Sampler()
    await dispatch_to(running).cancel(sample)
    assert running.cancelled == [str(sample)]
    await dispatch_to(Sampler(AssertionError("started again"))).cancel(sample)
    await dispatch_to().cancel(sample)
    with pytest.raises(WorkerUnavailable, match="down"):
        await dispatch_to(Sampler(WorkerUnavailable("down"), outlives_connections=True)).cancel(sample)
