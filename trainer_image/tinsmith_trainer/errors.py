"""The errors of a worker, and the data of a failure that is stored and sent.

`training/retries.py` translates errors into failures for clients, `worker/grpc_server.py` into gRPC statuses, and
`worker/termination_log.py` into reasons for not starting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Category = Literal["user", "server"]


@dataclass(frozen=True, slots=True)
class Failure:
    """The data of an error that is stored and sent."""

    category: Category
    message: str


class TrainerError(Exception):
    """A failed operation. `str(error)` says what happened, to what, and what to do."""

    category: Category = "server"


class UserError(TrainerError):
    """An invalid request. The same request would fail again."""

    category: Category = "user"


class ServerError(TrainerError):
    """A failure of this worker during a valid request."""


class Refused(TrainerError):
    """An error for an operation that is refused before it runs, because of the server or an earlier operation."""

    def __init__(self, category: Category, message: str) -> None:
        super().__init__(message)
        self.category = category


class StorageUnavailable(ServerError):
    """A checkpoint root that cannot be reached, or that refuses requests for a temporary reason.

    The same call may succeed later.
    """


class StorageFull(StorageUnavailable):
    """A checkpoint root without space for this checkpoint. Deleting other checkpoints makes space."""


class OutOfMemory(ServerError):
    """A device or machine without memory. The same call may succeed when memory becomes free."""


class SamplerClosed(ServerError):
    """An error for a sample that was still running when the sampler ended."""


class ModelNotFound(TrainerError):
    """A missing base model. The message says whether the name, the revision, the token or the network is the cause."""


class ModelDirectoryInvalid(TrainerError):
    """A base model's directory that cannot be loaded. The message names the file."""


class ModelCannotLoad(TrainerError):
    """A base model that the engine cannot load, although the files of the model may be valid.

    The message quotes the error.
    """


class ModelChanged(TrainerError):
    """Base weights on disk that differ from the base weights in the journal."""


class VolumeUnsuitable(TrainerError):
    """A volume that cannot store the journal durably, or to which this process may not write."""


class ImageChanged(TrainerError):
    """An error for a start with another image than `image`.

    Operations that ran with `image` need a replay. The bits of a replay with another image may differ.
    """

    def __init__(self, message: str, image: str) -> None:
        super().__init__(message)
        self.image = image


class NumericsChanged(TrainerError):
    """An error for a start with another engine, device, version or number of threads.

    A replay of the operations would give other bits.
    """


class TlsInvalid(TrainerError):
    """A certificate, key or certificate authority that cannot be used."""


class JournalFull(TrainerError):
    """A volume without space for a further operation or snapshot.

    The operation is refused, or the snapshot is not taken.
    """


class SnapshotRefused(ServerError):
    """An error for a snapshot that is not taken, because too many processes ended during earlier attempts."""


class SnapshotDamaged(ServerError):
    """A snapshot that is missing or altered. A damaged snapshot stays unreadable after a restart."""


class CheckpointInvalid(UserError):
    """A checkpoint that is missing, truncated, altered, or of another base model."""


class CheckpointAltered(CheckpointInvalid):
    """A checkpoint with files that differ from the saved files."""


class SamplerUnready(Exception):
    """A sampler that gets no new samples at present. The client should ask another replica."""


class Draining(Exception):
    """A process that is shutting down. The client should ask another instance or replica."""


# Errors are recognized by their messages, because engines need not use torch. The messages are from CUDA, its
# libraries, and torch on a CPU.
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in OUT_OF_MEMORY)
