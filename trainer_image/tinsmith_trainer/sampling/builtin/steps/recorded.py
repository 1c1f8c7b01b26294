"""Decode steps whose kernels are recorded once and then launched by one call.

A decode step of an 8B model launches 3,500 kernels. A GPU computes them in a fraction of the time in which Python
launches them. So on a GPU the kernels of a step are recorded as a CUDA graph. A recording holds the addresses of its
inputs, so the inputs of each step are copied into the tensors of the recording. A recording serves steps of one shape,
one batch and one route.

The first step of a shape is not recorded: it prepares the libraries, and many shapes occur only once. Each recording
is compared with the step itself. If recording fails or the results differ, the log says so, and steps run as before.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import structlog
import torch
from torch import Tensor

from tinsmith_trainer.errors import is_out_of_memory
from tinsmith_trainer.torch_model.device import HIGH_PRIORITY, LaunchPace
from tinsmith_trainer.torch_model.lora import Route

log = structlog.get_logger(__name__)

MOST_RECORDINGS = 16
"""The number of recordings of all batches, for which the least recently used ones make room."""
RECORDED_AT = 3
"""The step of a shape that is recorded.

With several adapters the route changes each time a sample begins or ends, and a recording takes as long as two steps.
"""
TOLERANCE = math.sqrt(torch.finfo(torch.bfloat16).eps)
"""The largest difference of a recorded step's logits from the step's own, as a part of the largest logit."""
MOST_FAILURES = 4
"""The number of recordings that may fail for lack of memory before no more are tried."""
STEPS_AHEAD = 1
"""The number of steps that the host may launch before the device has computed them."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a decode step on the device.

    `ids`, `positions`, and the rotary positions `angles` are `[rows, 1]`.
    """

    ids: Tensor
    positions: Tensor
    angles: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.ids, self.positions, self.angles

    def clone(self) -> StepInputs:
        angles = None if self.angles is None else self.angles.clone()
        return StepInputs(self.ids.clone(), self.positions.clone(), angles)

    def copy_from(self, other: StepInputs) -> None:
        for own, new in zip(self.tensors, other.tensors, strict=True):
            if own is not None and new is not None:
                own.copy_(new)


Compute = Callable[[StepInputs], Tensor]
"""Computes logits `[rows, vocab]` in float32. Its kernels depend only on the addresses of the inputs."""


class Recording(Protocol):
    """The recorded kernels of a step."""

    output: Tensor

    def replay(self) -> None:
        """Launch the kernels again. They read the same inputs and write the same output."""


class CudaGraphs:
    """The recording of CUDA graphs, which share one pool of memory.

    Sharing is safe, because steps run one after another on one stream, and a step's output is copied at once. The pool
    is lost when its last graph ends, so the newest graph is kept.

    Kernels are recorded on a stream that nothing else uses. Another thread loads adapters on the sampler's stream, and
    a recording would contain the copies, or fail. Only the calls of this thread are checked, because other threads use
    the device meanwhile. `torch.cuda.graph` is not used: it would empty the cache of memory, which the engine needs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _new_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._newest: _CudaGraph | None = None
        self._failed: list[_CudaGraph] = []

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        while self._stream == torch.cuda.current_stream(self._device):  # PyTorch gives out 32 streams in turn
            self._stream = _new_stream(self._device)
        graph = _CudaGraph()
        try:
            with _no_garbage_collection(), torch.cuda.stream(self._stream):
                graph.record(compute, self._pool)
        except Exception:
            self._failed.append(graph)  # the allocator may still refer to it
            # PyTorch leaves this out if the end of a recording fails, and later allocations would not free memory.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
            raise
        self._newest = graph
        return graph


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream with the sampler's priority, because a recorded kernel keeps the priority of its stream."""
    return torch.cuda.Stream(device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]


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

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self.output = torch.empty(0)

    def record(self, compute: Callable[[], Tensor], pool: Any) -> None:
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
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
        self._failures = 0
        self.is_on = True
        self.batches: WeakSet[RecordedSteps] = WeakSet()
        self.uses = itertools.count()

    def make_room(self, most: int) -> None:
        """Drop the least recently used recordings of all batches, until one more makes at most `most`."""
        held = [(own.last_use, batch, shape) for batch in self.batches for shape, own in batch.recorded.items()]
        for _, batch, shape in sorted(held, key=lambda one: one[0])[: max(0, len(held) + 1 - most)]:
            batch.drop(shape)

    def record(self, inputs: StepInputs, compute: Compute) -> Recording | None:
        """Record a step, and compare the recording with the step itself. Returns None if this fails."""
        try:
            recording = self._record(lambda: compute(inputs))
            _check(recording, compute(inputs))
            return recording
        except Exception as error:  # a model may do what cannot be recorded, or memory may be short
            found = error.__context__ or error  # the end of a failed recording fails, too, and does not know the cause
            self._failures += 1
            self.is_on = is_out_of_memory(found) and self._failures < MOST_FAILURES
            log.warning("a decode step is not recorded, and runs slower", error=f"{type(found).__name__}: {found}")
            return None


def _check(recording: Recording, expected: Tensor) -> None:
    """Raise ValueError if the recording computes other logits than the step itself.

    Rows that are not finite are not compared: the weights of their adapter have diverged.
    """
    recording.replay()
    rows = expected.isfinite().all(-1)
    apart, largest = ((recording.output - expected)[rows].abs(), expected[rows].abs())
    if rows.any() and not apart.max() <= TOLERANCE * largest.max():
        raise ValueError(f"the recorded step's logits are {float(apart.max()):g} apart")


def recorder_for(device: torch.device) -> StepRecorder | None:
    """Return the recorder for a device, or None for a CPU, where launches cost nothing next to the arithmetic."""
    return StepRecorder(CudaGraphs(device), LaunchPace(STEPS_AHEAD)) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class _Shape:
    extent: int
    rows: int
    has_angles: bool


@dataclass(slots=True)
class _RecordedStep:
    inputs: StepInputs
    recording: Recording
    last_use: int = 0


class RecordedSteps:
    """The recorded steps of one batch. All are dropped when the route changes. `most` is the limit for all batches."""

    def __init__(self, recorder: StepRecorder, most: int = MOST_RECORDINGS) -> None:
        self._recorder = recorder
        self._most = most
        self._route: Route | None = None
        self._seen: Counter[_Shape] = Counter()
        self.recorded: dict[_Shape, _RecordedStep] = {}
        recorder.batches.add(self)

    def drop(self, shape: _Shape) -> None:
        """Drop a recording. The shape must come as often as a new one before it is recorded again."""
        del self.recorded[shape], self._seen[shape]

    def run(self, inputs: StepInputs, extent: int, route: Route, compute: Compute) -> Tensor:
        """Return the logits of a step, from a recording if there is one. `compute` has the batch, extent and route."""
        if route is not self._route or not self._recorder.is_on:
            self._route = route
            self._seen.clear()
            self.recorded.clear()
        shape = _Shape(extent, len(inputs.ids), inputs.angles is not None)
        self._seen[shape] += 1
        if shape not in self.recorded and not self._records(shape, inputs, compute):
            return compute(inputs)
        own = self.recorded[shape]
        own.last_use = next(self._recorder.uses)
        own.inputs.copy_from(inputs)
        own.recording.replay()
        logits = own.recording.output.clone()
        self._recorder.pace()
        return logits

    def _records(self, shape: _Shape, inputs: StepInputs, compute: Compute) -> bool:
        """Record the step if it has come often enough. Return whether it is recorded."""
        if self._seen[shape] < RECORDED_AT or not self._recorder.is_on:
            return False
        self._recorder.make_room(self._most)
        own = inputs.clone()
        recording = self._recorder.record(own, compute)
        if recording is None:
            del self._seen[shape]  # tried again after as many steps, if memory was short
            return False
        self.recorded[shape] = _RecordedStep(own, recording)
        return True
