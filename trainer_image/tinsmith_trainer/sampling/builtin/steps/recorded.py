"""Decode steps whose kernels are recorded once and then launched by one call.

A decode step of an 8B model launches 3,500 kernels. A GPU computes them in a fraction of the time in which Python
launches them. So on a GPU the kernels of a step are recorded as a CUDA graph. A recording holds the addresses of its
inputs, so the inputs of each step are copied into the tensors of the recording. A recording serves steps of one shape,
one batch and one route.

The first step of a shape is not recorded: it prepares the libraries, and many shapes occur only once. The first
recording of a process is compared with the step itself. If recording fails or the results differ, the log says so, and
steps run as before.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch
from torch import Tensor

from tinsmith_trainer.torch_model.device import HIGH_PRIORITY, LaunchPace
from tinsmith_trainer.torch_model.lora import Route

log = structlog.get_logger(__name__)

MOST_RECORDINGS = 8
"""The number of recordings of a batch. Each keeps the memory of a step, about 100 MB for 32 rows of an 8B model."""
STEPS_AHEAD = 1
"""The number of steps that the host may launch before the device has computed them."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a decode step on the device.

    `ids`, `positions`, and the rotary positions `angles` are `[rows, 1]`. `rows` are row numbers `[rows]`, or None for
    the first rows of the batch.
    """

    ids: Tensor
    positions: Tensor
    angles: Tensor | None = None
    rows: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.ids, self.positions, self.angles, self.rows

    def clone(self) -> StepInputs:
        return StepInputs(self.ids.clone(), self.positions.clone(), _clone_of(self.angles), _clone_of(self.rows))

    def copy_from(self, other: StepInputs) -> None:
        for own, new in zip(self.tensors, other.tensors, strict=True):
            if own is not None and new is not None:
                own.copy_(new)


def _clone_of(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


Compute = Callable[[StepInputs], Tensor]
"""Computes logits `[rows, vocab]` in float32. Its kernels depend only on the addresses of the inputs."""


class Recording(Protocol):
    """The recorded kernels of a step."""

    output: Tensor

    def replay(self) -> None:
        """Launch the kernels again. They read the same inputs and write the same output."""


class CudaGraphs:
    """The recording of CUDA graphs, each with its own memory.

    Kernels are recorded on a stream that nothing else uses. Another thread loads adapters on the sampler's stream, and
    a recording would contain the copies, or fail. Only the calls of this thread are checked, because other threads use
    the device meanwhile. `torch.cuda.graph` is not used: it would empty the cache of memory, which the engine needs.
    """

    def __init__(self, device: torch.device) -> None:
        # A recorded kernel keeps the priority of the stream on which it is recorded.
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        with _no_garbage_collection(), torch.cuda.stream(self._stream):
            return _CudaGraph(compute)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage: the end of an older graph would be an illegal call during a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _CudaGraph:
    """One CUDA graph."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(capture_error_mode="thread_local")
        try:
            self.output = compute()
        finally:
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class StepRecorder:
    """The recorder of a forward. `record` makes a recording; `pace` limits how far the host is ahead of the device."""

    def __init__(self, record: Callable[[Callable[[], Tensor]], Recording], pace: Callable[[], None]) -> None:
        self._record = record
        self.pace = pace
        self.is_on = True
        self._is_checked = False

    def record(self, inputs: StepInputs, compute: Compute) -> Recording | None:
        """Record a step. Returns None if this model's steps cannot be recorded."""
        try:
            recording = self._record(lambda: compute(inputs))
            if not self._is_checked:
                self._check(recording, compute(inputs))
            return recording
        except Exception as error:  # a model may do what cannot be recorded, or memory may be short
            self.is_on = False
            log.warning("decode steps are not recorded, and run slower", error=f"{type(error).__name__}: {error}")
            return None

    def _check(self, recording: Recording, expected: Tensor) -> None:
        """Raise ValueError if the recording computes other logits than the step itself."""
        recording.replay()
        apart = float((recording.output - expected).abs().max())
        if not apart <= math.sqrt(torch.finfo(torch.bfloat16).eps) * float(expected.abs().max()):
            raise ValueError(f"the recorded step's logits are {apart:g} apart")
        self._is_checked = True


def recorder_for(device: torch.device) -> StepRecorder | None:
    """Return the recorder for a device, or None for a CPU, where launches cost nothing next to the arithmetic."""
    return StepRecorder(CudaGraphs(device), LaunchPace(STEPS_AHEAD)) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class _Shape:
    extent: int
    rows: int
    has_angles: bool
    has_rows: bool


class RecordedSteps:
    """The recorded steps of one batch. All are dropped when the route changes."""

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._route: Route | None = None
        self._seen: set[_Shape] = set()
        self._recorded: dict[_Shape, tuple[StepInputs, Recording]] = {}

    def run(self, inputs: StepInputs, extent: int, route: Route, compute: Compute) -> Tensor:
        """Return the logits of a step, from a recording if there is one. `compute` has the batch, extent and route."""
        if route is not self._route:
            self._route = route
            self._seen.clear()
            self._recorded.clear()
        shape = _Shape(extent, len(inputs.ids), inputs.angles is not None, inputs.rows is not None)
        found = self._recorded.get(shape) or self._new(shape, inputs, compute)
        if found is None:
            return compute(inputs)
        own, recording = found
        own.copy_from(inputs)
        recording.replay()
        logits = recording.output.clone()
        self._recorder.pace()
        return logits

    def _new(self, shape: _Shape, inputs: StepInputs, compute: Compute) -> tuple[StepInputs, Recording] | None:
        if shape not in self._seen or not self._recorder.is_on:
            self._seen.add(shape)
            return None
        own = inputs.clone()
        recording = self._recorder.record(own, compute)
        if recording is None:
            return None
        if len(self._recorded) >= MOST_RECORDINGS:
            del self._recorded[next(iter(self._recorded))]
        self._recorded[shape] = own, recording
        return own, recording
