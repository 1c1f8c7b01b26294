"""What goes wrong in a worker, one family.

`training/retries.py` turns it into what a client hears, `worker/grpc_server.py` into gRPC statuses, and
`worker/termination_log.py` into reasons for not starting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Category = Literal["user", "server"]


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it is stored and sent."""

    category: Category
    message: str


class TrainerError(Exception):
    """An operation failed. `str(error)` says what happened, to what, and what to do."""

    category: Category = "server"


class UserError(TrainerError):
    """The request cannot work as it is; repeating it unchanged will not help."""

    category: Category = "user"


class ServerError(TrainerError):
    """The request was fine; this worker failed at it."""


class Refused(TrainerError):
    """Failed before it ran: rejected by the server, or by what came before it."""

    def __init__(self, category: Category, message: str) -> None:
        super().__init__(message)
        self.category = category


class StorageUnavailable(ServerError):
    """The checkpoint root could not be reached, or refused for a reason that may pass; the same call may work soon."""


class StorageFull(StorageUnavailable):
    """The checkpoint root has no room for this checkpoint; it may have when others are deleted."""


class OutOfMemory(ServerError):
    """The device, or this machine, has no room; it may have when something else goes."""


class SamplerClosed(ServerError):
    """The sampler ended before the sample did."""


class ModelNotFound(TrainerError):
    """There is no base model where it should be. The message says whether name, revision, token or network failed."""


class ModelDirectoryInvalid(TrainerError):
    """A base model's directory cannot be loaded. The message names the file."""


class ModelCannotLoad(TrainerError):
    """The files of a base model may be sound, and the engine fails at it all the same. The message quotes the error."""


class ModelChanged(TrainerError):
    """The journal belongs to other base weights than those on disk now."""


class VolumeUnsuitable(TrainerError):
    """The volume cannot keep what a journal promises, or this process may not write to it."""


class ImageChanged(TrainerError):
    """Operations that ran under `image` would run again under another one, which may compute other bits."""

    def __init__(self, message: str, image: str) -> None:
        super().__init__(message)
        self.image = image


class NumericsChanged(TrainerError):
    """Operations would be replayed by another engine, device, version or number of threads, to other bits."""


class TlsInvalid(TrainerError):
    """Certificate, key or certificate authority cannot be used."""


class JournalFull(TrainerError):
    """The volume has no room for another operation, which was not accepted, or for a snapshot, which was not taken."""


class SnapshotRefused(ServerError):
    """Too many processes ended while they took it."""


class SnapshotDamaged(ServerError):
    """A snapshot is gone, or not what was written: no later start can read it either."""


class CheckpointInvalid(UserError):
    """A checkpoint is missing, truncated, altered, or of another base model."""


class CheckpointAltered(CheckpointInvalid):
    """The files of a checkpoint are not as they were saved."""


class Draining(Exception):
    """On its way out: another instance, or another replica, should be asked."""


# By their words, since engines need not be built on torch. Of CUDA and its libraries, and of torch on a CPU.
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in OUT_OF_MEMORY)
