"""The compute device of a process: choice, lock, memory between forwards, and faults that make the device unusable."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import torch
from torch import Tensor

from tinsmith_trainer.errors import ServerError, is_out_of_memory
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

    A CUDA fault corrupts the context: every later call of the process fails in the same way.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error):  # passes when other jobs end
        return False
    # torch before 2.8 reports such a fault only in the text
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in text


FLOAT32_BYTES = 4


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


class DeviceLock:
    """A fair lock. `with lock.held(): …` waits for all threads that requested the lock before.

    The engine and the sampler share the device. Each holder has the lock for one microbatch or decode step, so that
    other threads do not wait too long. With an ordinary lock, the thread that has released the lock would usually get
    the lock again.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._busy = False

    @property
    def waiting(self) -> int:
        """The number of threads that wait for the lock."""
        with self._guard:
            return len(self._waiting)

    @contextmanager
    def held(self) -> Iterator[None]:
        self._wait()
        try:
            yield
        finally:
            self._pass_on()

    def _wait(self) -> None:
        with self._guard:
            if not self._busy:
                self._busy = True
                return
            ready = threading.Event()
            self._waiting.append(ready)
        ready.wait()

    def _pass_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._busy = False


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
