"""The ranks of one model as the engine sees them, wherever they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch.distributed

from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.torch_model.device import is_device_fault


class RanksLost(Exception):
    """A rank died, or some ranks failed where others did not: what the ranks hold is no longer one adapter's state."""


class RanksFailed(Exception):
    """Every rank failed at the same computation, and lives on."""


class RankGroup(Protocol):
    """Calls every rank's `Rank` method of that name, one call at a time.

    Raises UserError and RanksFailed where every rank raised alike, RanksLost where they did not.
    """

    @property
    def parallelism(self) -> Parallelism: ...

    def all(self, method: str, *args: Any) -> list[Any]:
        """The same arguments to every rank; results by rank."""

    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """Shard i, as first argument, to all ranks of data index i; results by data index, from its speaker."""

    def close(self) -> None:
        """Frees the ranks. Idempotent."""


Fault = Literal["user", "computation", "lost"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call on one rank, picklable: exceptions of many libraries are not."""

    value: Any = None
    fault: Fault | None = None
    message: str = ""


def attempt(call: Callable[[], Any]) -> Answer:
    """Runs a rank's part of a call. Errors that no rank should ever raise are raised as they are."""
    try:
        return Answer(call())
    except UserError as error:
        return Answer(fault="user", message=str(error))
    except RanksLost as error:
        return Answer(fault="lost", message=str(error))
    except (RuntimeError, MemoryError) as error:  # torch's out-of-memory is a RuntimeError
        fault: Fault = "lost" if _is_lost(error) else "computation"
        return Answer(fault=fault, message=f"{type(error).__name__}: {error}")


def _is_lost(error: BaseException) -> bool:
    """Neither a device after its fault nor a process group after a broken connection can be used again."""
    text = str(error)
    return (
        is_device_fault(error)
        or isinstance(error, torch.distributed.DistError)
        or any(library in text for library in ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer"))
    )


def agreed(answers: Sequence[Answer]) -> list[Any]:
    """The ranks' values. Raises UserError, RanksFailed or RanksLost."""
    faults = {answer.fault for answer in answers}
    if faults == {None}:
        return [answer.value for answer in answers]
    first = next(answer for answer in answers if answer.fault is not None)
    if faults == {"user"}:
        raise UserError(first.message)
    if faults == {"computation"}:
        raise RanksFailed(first.message)
    failed = [rank for rank, answer in enumerate(answers) if answer.fault is not None]
    raise RanksLost(f"Of {len(answers)} ranks {failed} failed at a call: {first.message}")
