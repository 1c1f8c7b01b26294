"""The interface of the engine to the ranks of one model, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch.distributed

from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.torch_model.device import is_device_fault


class RanksLost(Exception):
    """An error that is raised after a rank died, or after only some ranks failed.

    The ranks no longer hold one consistent state.
    """


class RanksFailed(Exception):
    """An error that is raised after every rank failed at the same computation. The ranks are still usable."""


class RankGroup(Protocol):
    """The ranks of a model. Each call runs a method on every `Rank`, and only one call runs at a time.

    Raises UserError or RanksFailed if every rank raised the same error, and RanksLost if the errors differ.
    """

    @property
    def parallelism(self) -> Parallelism: ...

    def all(self, method: str, *args: Any) -> list[Any]:
        """Call every rank with the same arguments, and return the results by rank."""

    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """Call the method on all ranks, with shard i as first argument on the ranks of data index i.

        Return one result per data index.
        """

    def close(self) -> None:
        """Free the ranks. Idempotent."""


Fault = Literal["user", "computation", "lost"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The picklable result of a call on one rank.

    An error is stored as data, because exceptions of many libraries cannot be pickled.
    """

    value: Any = None
    fault: Fault | None = None
    message: str = ""


def attempt(call: Callable[[], Any]) -> Answer:
    """Run a rank's part of a call. Unexpected errors are raised unchanged."""
    try:
        return Answer(call())
    except UserError as error:
        return Answer(fault="user", message=str(error))
    except RanksLost as error:
        return Answer(fault="lost", message=str(error))
    except (RuntimeError, MemoryError) as error:  # includes torch's out-of-memory error
        fault: Fault = "lost" if _is_lost(error) else "computation"
        return Answer(fault=fault, message=f"{type(error).__name__}: {error}")


def _is_lost(error: BaseException) -> bool:
    """Return whether a device fault or a broken connection makes the rank unusable."""
    text = str(error)
    return (
        is_device_fault(error)
        or isinstance(error, torch.distributed.DistError)
        or any(library in text for library in ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer"))
    )


def agreed(answers: Sequence[Answer]) -> list[Any]:
    """Return the ranks' values. Raises UserError, RanksFailed or RanksLost."""
    faults = {answer.fault for answer in answers}
    if faults == {None}:
        return [answer.value for answer in answers]
    first = next(answer for answer in answers if answer.fault is not None)
    if faults == {"user"}:
        raise UserError(first.message)
    if faults == {"computation"}:
        raise RanksFailed(first.message)
    failed = [rank for rank, answer in enumerate(answers) if answer.fault is not None]
    raise RanksLost(f"Of {len(answers)} ranks, {failed} failed in a call: {first.message}")
