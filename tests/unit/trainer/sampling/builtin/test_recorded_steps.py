"""Recorded decode steps compute what the steps themselves compute, and a failed recording changes no answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.engine.like_gpu import Repeated, sampling_like_gpu
from support.sampler.jobs import ask_all, job, prompt_of
from support.tiny_models import tiny_model
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings, forward
from tinsmith_trainer.sampling.builtin.steps.recorded import MOST_RECORDINGS, RecordedSteps, StepInputs, StepRecorder
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


def test_from_the_second_step_of_a_shape_on_all_steps_have_the_same_inputs_in_memory() -> None:
    steps = Steps()
    logits = [steps.run(token) for token in range(6)]
    assert len(set(steps.addresses[1:])) == 1
    assert steps.addresses[0] not in steps.addresses[1:]
    torch.testing.assert_close(logits[2], torch.tensor([[2.0], [3.0]]))  # later steps do not overwrite it


@pytest.mark.parametrize("other", [{"extent": 64}, {"rows": 4}, {"route": {"q_proj": None}}], ids=str)
def test_a_step_of_another_shape_or_route_is_not_taken_for_a_recorded_one(other: dict[str, object]) -> None:
    steps = Steps()
    for token in range(4):
        steps.run(token)
    recorded_at = steps.addresses[-1]
    steps.run(9, **other)  # type: ignore[arg-type]
    assert steps.addresses[-1] != recorded_at


def test_a_batch_keeps_a_limited_number_of_recordings() -> None:
    steps = Steps()
    for extent in range(2 * MOST_RECORDINGS):
        steps.run(1, extent)
        steps.run(2, extent)
    assert len(steps.recorded._recorded) == MOST_RECORDINGS


def test_equal_requests_find_the_recordings_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of rows rises and falls as samples begin and end."""
    recorded: list[Repeated] = []

    class Counted(Repeated):
        def __init__(self, compute: Callable[[], Tensor]) -> None:
            recorded.append(self)
            super().__init__(compute)

    with sampling_like_gpu():
        monkeypatch.setattr(forward, "recorder_for", lambda _device: StepRecorder(Counted, lambda: None))
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
    for token in range(5):
        steps.run(token)
    assert not steps.recorder.is_on
