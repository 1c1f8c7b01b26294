"""Errors after which a device serves this process no more, told from those that concern one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import structlog
import torch

from tinsmith_trainer.errors import is_out_of_memory
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
