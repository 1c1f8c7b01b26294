"""Which operations are retried later instead of failed, decided purely.

Clients take a failed save or load as final, and an outage of the checkpoint root may be over in a minute. A volume that
is full fails nothing that was accepted.
"""

from __future__ import annotations

from tinsmith_rpc import worker_pb2

from tinsmith_trainer.disk.free_space import ROOM_RETRY_SECONDS
from tinsmith_trainer.errors import JournalFull, StorageUnavailable

RELEASE_RETRY_SECONDS = 30.0
STORAGE_RETRY_SECONDS = 10.0
STORAGE_WAIT_SECONDS = 300.0
"""How long one operation waits for the checkpoint root, from its first attempt on."""

NEED_STORAGE = (worker_pb2.SAVE_WEIGHTS, worker_pb2.LOAD_WEIGHTS, worker_pb2.LOAD_MODEL)


def retry_seconds(kind: worker_pb2.OperationKind.ValueType, error: Exception, waited_seconds: float) -> float | None:
    """When the operation is to be tried again; None: the error is its result."""
    if kind == worker_pb2.RELEASE_MODEL:  # without its last checkpoint the work would be lost: it keeps its slot
        return RELEASE_RETRY_SECONDS
    if isinstance(error, JournalFull):
        return ROOM_RETRY_SECONDS  # an attempt is a look at what is free
    if not waits_for_storage(kind, error) or waited_seconds >= STORAGE_WAIT_SECONDS:
        return None
    return min(STORAGE_RETRY_SECONDS, STORAGE_WAIT_SECONDS - waited_seconds)


def waits_for_storage(kind: worker_pb2.OperationKind.ValueType, error: Exception) -> bool:
    return kind in NEED_STORAGE and isinstance(error, StorageUnavailable)


def final_message(kind: worker_pb2.OperationKind.ValueType, error: Exception) -> str:
    """What the client hears of an error that is the operation's result."""
    if not waits_for_storage(kind, error):
        return str(error)
    return (
        f"{str(error).rstrip('.')}. It was tried again for {STORAGE_WAIT_SECONDS:.0f} s. "
        "Send the request again when the storage answers."
    )
