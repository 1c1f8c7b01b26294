"""Recorded decode steps compute what the steps themselves compute, and a failed recording changes no answer."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import structlog
import torch
from support.engine.like_gpu import Repeated, sampling_like_gpu
from support.sampler.jobs import ask_all, job, prompt_of
from support.tiny_models import tiny_model
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings, forward
from tinsmith_trainer.sampling.builtin.steps.recorded import (
    MOST_FAILURES,
    MOST_RECORDINGS,
    RECORDED_AT,
    CudaGraphs,
    RecordedSteps,
    StepInputs,
    StepRecorder,
)
from tinsmith_trainer.torch_model.lora import Route
from torch import Tensor

ROUTE: Route = {}


class Steps:
    """Steps that add token and position, and count how often Python computes them."""

    def __init__(self, record: Callable[[Callable[[], Tensor]], Repeated] = Repeated) -> None:
        self.recorder = StepRecorder(record, lambda: None)
        self.recorded = RecordedSteps(self.recorder)
        self.inputs: list[StepInputs] = []

    def run(self, token: int, extent: int = 32, rows: int = 2, route: Route = ROUTE) -> Tensor:
        inputs = StepInputs(torch.full((rows, 1), token), torch.arange(rows)[:, None])
        logits = self.recorded.run(inputs, extent, route, self._compute)
        torch.testing.assert_close(logits, (token + torch.arange(rows)[:, None]).float())
        return logits

    def _compute(self, inputs: StepInputs) -> Tensor:
        self.inputs.append(inputs)
        return (inputs.ids + inputs.positions).float()

    @property
    def addresses(self) -> list[int]:
        """The address of the tokens in each computation."""
        return [inputs.ids.data_ptr() for inputs in self.inputs]


def test_a_shape_that_has_come_often_enough_is_recorded_and_has_the_same_inputs_in_memory() -> None:
    steps = Steps()
    logits = [steps.run(token) for token in range(RECORDED_AT + 4)]
    first, later = steps.addresses[: RECORDED_AT - 1], steps.addresses[RECORDED_AT - 1 :]
    assert len(set(later)) == 1
    assert set(first).isdisjoint(later)
    torch.testing.assert_close(logits[2], torch.tensor([[2.0], [3.0]]))  # later steps do not overwrite it


@pytest.mark.parametrize("other", [{"extent": 64}, {"rows": 4}, {"route": {"q_proj": None}}], ids=str)
def test_a_step_of_another_shape_or_route_is_not_taken_for_a_recorded_one(other: dict[str, object]) -> None:
    steps = Steps()
    for token in range(RECORDED_AT + 1):
        steps.run(token)
    recorded_at = steps.addresses[-1]
    steps.run(9, **other)  # type: ignore[arg-type]
    assert steps.addresses[-1] != recorded_at


def test_batches_together_keep_a_limited_number_of_recordings_and_those_that_are_in_use() -> None:
    steps = Steps()
    batches = [steps.recorded, RecordedSteps(steps.recorder)]
    for extent in range(2 * MOST_RECORDINGS):
        steps.recorded = batches[extent % 2]
        for token in range(RECORDED_AT):
            steps.run(token, extent)
        steps.recorded = batches[0]
        steps.run(0, extent=0)
    recorded = [shape.extent for batch in batches for shape in batch.recorded]
    assert len(recorded) == MOST_RECORDINGS
    assert min(recorded) == 0
    assert {*recorded} - {0} == set(range(MOST_RECORDINGS + 1, 2 * MOST_RECORDINGS))


def test_a_recording_that_made_room_is_not_recorded_at_its_next_step_again() -> None:
    """Otherwise steps of more shapes than recordings would all be recorded, which takes as long as two steps."""
    steps = Steps()
    steps.recorded = RecordedSteps(steps.recorder, most=1)
    for token in range(RECORDED_AT):
        steps.run(token, extent=32)
    for token in range(RECORDED_AT):
        steps.run(token, extent=64)
    steps.run(0, extent=32)
    assert [shape.extent for shape in steps.recorded.recorded] == [64]


def test_an_adapter_that_has_diverged_does_not_end_recordings() -> None:
    steps = Steps()
    compute, infinite = steps._compute, torch.tensor([[torch.inf], [1.0]])
    steps._compute = lambda inputs: compute(inputs) * infinite  # type: ignore[method-assign]
    for _ in range(RECORDED_AT + 1):
        steps.recorded.run(StepInputs(torch.ones(2, 1), torch.arange(2)[:, None]), 32, ROUTE, steps._compute)
    assert steps.recorder.is_on
    assert steps.recorded.recorded


def test_equal_requests_find_the_recordings_of_earlier_ones() -> None:
    """The number of rows rises and falls as samples begin and end."""
    recorded: list[Repeated] = []

    class Counted(Repeated):
        def __init__(self, compute: Callable[[], Tensor]) -> None:
            recorded.append(self)
            super().__init__(compute)

    with sampling_like_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "recorder_for", lambda _device: StepRecorder(Counted, lambda: None))
        sampler = BuiltinSampler(tiny_model(), BuiltinSamplerSettings())
        counts = []
        for _ in range(3):
            jobs = [job(prompt_of(10, seed=n), max_tokens=12 * n, seed=n) for n in range(1, 6)]
            ask_all(sampler, jobs)
            counts.append(len(recorded))
        sampler.close()
    assert counts[0] > 0
    assert counts[1] == counts[2]


def fails(_compute: Callable[[], Tensor]) -> Repeated:
    raise RuntimeError("operation not permitted when stream is capturing")


class Stale(Repeated):
    """A recording that lacks a kernel, as one that a model launches on another stream."""

    def replay(self) -> None:
        self.output.zero_()


@pytest.mark.parametrize("record", [fails, Stale])
def test_if_steps_cannot_be_recorded_they_are_answered_without_recordings(
    record: Callable[[Callable[[], Tensor]], Repeated],
) -> None:
    steps = Steps(record)
    for token in range(RECORDED_AT + 3):
        steps.run(token)
    assert not steps.recorder.is_on


@pytest.mark.parametrize(("failures", "is_on"), [(1, True), (MOST_FAILURES, False)])
def test_if_memory_is_short_steps_are_recorded_later_but_not_tried_for_ever(failures: int, is_on: bool) -> None:
    left = iter(range(failures))

    def record(compute: Callable[[], Tensor]) -> Repeated:
        if next(left, None) is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Repeated(compute)

    steps = Steps(record)
    for token in range((failures + 1) * RECORDED_AT):
        steps.run(token)
    assert steps.recorder.is_on == is_on
    assert bool(steps.recorded.recorded) == is_on


class StandInGraph:
    """PyTorch's graph, which records nothing."""

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        assert not gc.isenabled(), "the end of an older graph would be a call that is not permitted"

    def capture_end(self) -> None:
        """End the recording."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for PyTorch's streams and graphs. Returns the pools whose recording was ended by hand.

    They assume that PyTorch gives out streams in turn, and that the first one is the caller's.
    """
    ended: list[str] = []
    streams = itertools.cycle(["the sampler's", "another"])
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device, priority: next(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: "the sampler's")
    monkeypatch.setattr(torch.cuda, "stream", used_stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda _index, pool: ended.append(pool), raising=False)
    return ended


@contextmanager
def used_stream(name: str) -> Iterator[None]:
    assert name == "another"
    yield


def test_a_step_is_recorded_on_a_stream_of_its_own(device: list[str]) -> None:
    recording = CudaGraphs(torch.device("cuda"))(lambda: torch.ones(1))
    assert recording.output.tolist() == [1.0]
    assert gc.isenabled()
    assert device == []


def test_after_a_failure_the_allocator_is_as_before_and_the_cause_is_known(device: list[str]) -> None:
    graphs = CudaGraphs(torch.device("cuda"))
    recorder = StepRecorder(graphs, lambda: None)

    def compute(_inputs: StepInputs) -> Tensor:
        raise RuntimeError("a copy from the host")

    inputs = StepInputs(torch.ones(1, 1), torch.ones(1, 1))
    with structlog.testing.capture_logs() as logs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandInGraph, "capture_end", fails_at_the_end)
        assert recorder.record(inputs, compute) is None
    assert device == ["pool"]
    assert "a copy from the host" in logs[0]["error"]
    assert gc.isenabled()


def fails_at_the_end(_graph: StandInGraph) -> None:
    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
