"""Errors after which a device serves this process no more, told from those that concern one call."""

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
    """For samplers; to be called while the error is handled. The engine's call beside it is not to blame.

    A process that fails every sample at once looks idle, so that clients' samples would all be sent to it; ended, it is
    started anew, and what it had is submitted again.
    """
    if is_device_fault(error):
        log.exception("the device is lost to this process")
        end_without_blame()


@contextlib.contextmanager
def needs_device() -> Iterator[None]:
    """Around an engine's call. A process without its device would fail every acknowledged operation, one by one: the
    next one runs them. The call counts as the reason, so that one that breaks the device is given up in the end.
    """
    try:
        yield
    except Exception as error:
        if is_device_fault(error):
            end_process("the device is lost to this process")
        raise


def is_device_fault(error: BaseException) -> bool:
    """A fault of CUDA spoils its context: every later call of the process fails like the first."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error):  # it comes back when other jobs end
        return False
    if isinstance(error, getattr(torch, "AcceleratorError", ())):  # torch before 2.8 says it in the text alone
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in text


FLOAT32_BYTES = 4


class WarmMemory:
    """Float32 on the CPU. Of a byte budget only what was taken at once at some time is ever touched."""

    def __init__(self) -> None:
        self._floats = torch.empty(0)
        self._taken = 0

    def begin(self, byte_budget: int) -> None:
        """Hands all of it out anew: nobody needs what was taken before."""
        self._taken = 0
        if len(self._floats) != byte_budget // FLOAT32_BYTES:
            self._floats = torch.empty(byte_budget // FLOAT32_BYTES)

    def take(self, floats: int) -> Tensor | None:
        """So many, with anything in them; None where the budget has no room for them."""
        if self._taken + floats > len(self._floats):
            return None
        self._taken += floats
        return self._floats[self._taken - floats : self._taken]


class DeviceTurn:
    """A fair lock. `with turn.taken(): …` waits behind all who asked before.

    The engine and the sampler share the device. A microbatch or a decode step takes a turn, so that neither starves: a
    plain lock would let the thread that just released it win again.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._busy = False

    @property
    def waiting(self) -> int:
        """How many threads wait behind the one that computes."""
        with self._guard:
            return len(self._waiting)

    @contextmanager
    def taken(self) -> Iterator[None]:
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
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def _pass_on(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._busy = False


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def place(device: str, dtype: str) -> tuple[str, torch.dtype]:
    """What `--device` and `--dtype` come to on this machine. Raises ServerError for a GPU that is not there.

    A GPU gets bfloat16, for which it has its fastest units; the CPU float32, in which engines keep bits.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ServerError(
            "--device cuda: this process sees no GPU. Give it one, with a driver and a PyTorch built for CUDA, "
            "or leave --device out."
        )
    chosen = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    automatic = torch.bfloat16 if chosen == "cuda" else torch.float32
    return chosen, DTYPES.get(dtype, automatic)
