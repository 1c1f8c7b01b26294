"""The errors of a worker.

`training/retries.py` translates them into failures for clients, `worker/grpc_server.py` into gRPC statuses, and
`worker/termination_log.py` into reasons for not starting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Category = Literal["user", "server"]


@dataclass(frozen=True, slots=True)
class Failure:
    """An error in the form that is stored and sent."""

    category: Category
    message: str


class TrainerError(Exception):
    """A failed operation. `str(error)` says what happened, to what, and what to do."""

    category: Category = "server"


class UserError(TrainerError):
    """An invalid request. Repeating it unchanged will not help."""

    category: Category = "user"


class ServerError(TrainerError):
    """A failure of this worker at a valid request."""


class Refused(TrainerError):
    """An error for an operation that is refused before it runs, by the server or because of an earlier operation."""

    def __init__(self, category: Category, message: str) -> None:
        super().__init__(message)
        self.category = category


class StorageUnavailable(ServerError):
    """A checkpoint root that cannot be reached, or refuses for a temporary reason. The same call may work soon."""


class StorageFull(StorageUnavailable):
    """A checkpoint root without space for this checkpoint. Deleting others makes space."""


class OutOfMemory(ServerError):
    """A device or machine without memory. The same call may work when memory becomes free."""


class SamplerClosed(ServerError):
    """An error for a sample whose sampler ends first."""


class ModelNotFound(TrainerError):
    """A missing base model. The message says whether the name, the revision, the token or the network is the cause."""


class ModelDirectoryInvalid(TrainerError):
    """A base model's directory that cannot be loaded. The message names the file."""


class ModelCannotLoad(TrainerError):
    """A base model that the engine cannot load, although its files may be valid. The message quotes the error."""


class ModelChanged(TrainerError):
    """Base weights on disk that differ from those of the journal."""


class VolumeUnsuitable(TrainerError):
    """A volume that cannot store the journal durably, or to which this process may not write."""


class ImageChanged(TrainerError):
    """A start on another image than `image`. Operations that ran on `image` need a replay, whose bits may differ."""

    def __init__(self, message: str, image: str) -> None:
        super().__init__(message)
        self.image = image


class NumericsChanged(TrainerError):
    """A start on another engine, device, version or number of threads.

    A replay of the operations would give other bits.
    """


class TlsInvalid(TrainerError):
    """A certificate, key or certificate authority that cannot be used."""


class JournalFull(TrainerError):
    """A volume without space for a further operation or snapshot. The operation is refused, the snapshot not taken."""


class SnapshotRefused(ServerError):
    """A snapshot that is not taken, because too many processes ended during earlier attempts."""


class SnapshotDamaged(ServerError):
    """A snapshot that is missing or altered, and that no later start can read either."""


class CheckpointInvalid(UserError):
    """A checkpoint that is missing, truncated, altered, or of another base model."""


class CheckpointAltered(CheckpointInvalid):
    """A checkpoint whose files differ from the saved files."""


class Draining(Exception):
    """A process that shuts down. The client should ask another instance or replica."""


# Errors are recognized by their messages, because engines need not use torch. The messages are from CUDA, its
# libraries, and torch on a CPU.
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in OUT_OF_MEMORY)
