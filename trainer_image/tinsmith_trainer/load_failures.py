"""What it means that a base model could not be loaded: whether another start would end the same way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import structlog

from tinsmith_trainer.errors import ModelCannotLoad, OutOfMemory, TrainerError

log = structlog.get_logger(__name__)

# By their words, since engines need not be built on torch. Of CUDA and its libraries, and of torch on a CPU.
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
BROKEN_DEVICE = "CUDA error"


@contextlib.contextmanager
def explained(engine: str, model: str) -> Iterator[None]:
    """Around whatever builds an engine. Raises ModelCannotLoad for what nobody foresaw, such as a forward that fails;
    OutOfMemory; and lets through what another process may not meet.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(
                f"There is no memory for {model}: {_in_one_line(error)}. "
                f"Give the worker more, or end what else uses it."
            ) from error
        if _may_pass(error):
            raise
        log.exception("the model cannot be loaded", engine=engine, model=model)
        raise ModelCannotLoad(
            f"The engine {engine} cannot load {model}: {_in_one_line(error)}. "
            f"Serve a model that it can run; the worker's log says where this one failed."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in OUT_OF_MEMORY)


def _may_pass(error: Exception) -> bool:
    """A network that is away; a device that is lost to this process, while the next one gets it, or another."""
    return isinstance(error, (ConnectionError, TimeoutError)) or BROKEN_DEVICE in str(error)


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".: ")
