"""The compute device of a process: choice, sharing, memory between forwards, and faults that make it unusable."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from tinsmith_trainer.errors import ServerError, is_out_of_memory
from tinsmith_trainer.process.device_turns import DeviceTurns, Use
from tinsmith_trainer.process.exit import end_process, end_without_blame

log = structlog.get_logger(__name__)


def end_if_device_is_lost(error: Exception) -> None:
    """End the process after a device fault in the sampler. Call this inside the `except` block of the error.

    The engine's current call is not counted as the cause. A process that fails every sample immediately looks idle, so
    all samples of clients would be routed to this process. A new process takes over, and the pending work is submitted
    again.
    """
    if is_device_fault(error):
        log.exception("the device is lost to this process")
        end_without_blame()


@contextlib.contextmanager
def needs_device() -> Iterator[None]:
    """End the process if an engine's call fails with a device fault.

    Without a device, the process would fail all acknowledged operations, one by one. The next process runs these
    operations. The engine's call counts as the cause. So a call that breaks the device each time is not retried after
    some attempts.
    """
    try:
        yield
    except Exception as error:
        if is_device_fault(error):
            end_process("the device is lost to this process")
        raise


def is_device_fault(error: BaseException) -> bool:
    """Return whether the error makes the device unusable for this process.

    A CUDA fault corrupts the context: every later call of the process fails in the same way. A call that cannot be
    recorded in a CUDA graph is no such fault.
    """
    text = str(error)
    if "captur" in text:
        return False
    if isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error):  # passes when other jobs end
        return False
    # torch before 2.8 reports such a fault only in the text
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in text


FLOAT32_BYTES = 4
HIGH_PRIORITY = -1
"""The priority of a CUDA stream that runs before streams with the priority 0."""


class WarmMemory:
    """Float32 memory on the CPU that one forward passes to the next forward.

    The first access to new memory can cost more than the computation in this memory. Measured on virtual machines: 0.5
    to 2 GB/s at the first access, 15 GB/s later. Of the budget of bytes, only the largest part that was ever in use at
    the same time is accessed.
    """

    def __init__(self) -> None:
        self._floats = torch.empty(0)
        self._taken = 0

    def begin(self, byte_budget: int) -> None:
        """Begin a new forward: all memory that was taken before may be overwritten."""
        self._taken = 0
        if len(self._floats) != byte_budget // FLOAT32_BYTES:
            self._floats = torch.empty(byte_budget // FLOAT32_BYTES)

    def take(self, floats: int) -> Tensor | None:
        """Return this many floats with undefined content, or None if the budget is too small."""
        if self._taken + floats > len(self._floats):
            return None
        self._taken += floats
        return self._floats[self._taken - floats : self._taken]


LAYERS_AHEAD = 2
"""The number of layers of training that the host may launch before the device has computed them.

The device always has work, and a layer of an 8B model with 4,096 tokens takes 7 ms.
"""


class LaunchPace:
    """A limit on how far the host is ahead of a GPU, as a number of launched parts.

    The host launches a whole microbatch in a quarter of the time in which the device computes it. Without a limit, the
    host's turns would say nothing about the device's time, and the next decode step would wait for all launched layers.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._launched: deque[torch.cuda.Event] = deque()

    def __call__(self) -> None:
        """Note that a part was launched, and wait for the part before the last ones."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._launched.append(event)
        if len(self._launched) > self._ahead:
            self._launched.popleft().synchronize()


class SharedDevice:
    """The turns of the users of a device, and what a sampler next to an engine needs.

    `turns` is the lock. A sampler works in `sampling()`, in all of its threads.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.turns = DeviceTurns()
        self._stream: torch.cuda.Stream | None = None
        self._pace: LaunchPace | None = None

    def prepare_sampling(self) -> None:
        """Prepare the device for a sampler. On a GPU, the sampler has a stream with a high priority.

        A decode step then needs to wait only for thread blocks that run, and not for layers that were launched earlier.
        """
        if self.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(self.device, priority=HIGH_PRIORITY)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self.device))  # the weights may still be on their way
            self._pace = LaunchPace(LAYERS_AHEAD)

    def sampling(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's work on the device is the sampler's.

        Memory that was allocated here is reused only here, so no kernel of the engine writes to it too early.
        """
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def offer_between(self, layers: Iterable[nn.Module]) -> None:
        """Let a sampler have its turns between these layers, in forward and in backward."""
        for layer in layers:
            layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)

    def _before_layer(self, _layer: nn.Module, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self._offer()
        hidden = args[0] if args else options.get("hidden_states")
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(self._after_backward)  # type: ignore[no-untyped-call]

    def _after_backward(self, _grad: Tensor) -> None:
        self._offer()

    def _offer(self) -> None:
        if self._pace is not None and self.turns.user is Use.TRAINING:
            self._pace()
        self.turns.offer()


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(device: str, dtype: str) -> tuple[str, torch.dtype]:
    """Return the device and dtype for `--device` and `--dtype` on this machine.

    By default, the dtype is bfloat16 on a GPU, because the fastest units of a GPU compute bfloat16. On a CPU, the dtype
    is float32, in which engines are bit-exact. Raises ServerError if a GPU is required and the machine has none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ServerError(
            "--device cuda: this process sees no GPU. Provide one, with a driver and a PyTorch built for CUDA, "
            "or omit --device."
        )
    chosen = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    automatic = torch.bfloat16 if chosen == "cuda" else torch.float32
    return chosen, DTYPES.get(dtype, automatic)
