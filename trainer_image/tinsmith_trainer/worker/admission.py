"""Admission of operations. If too many operations wait, an operation is acknowledged late.

If the disk is full, an operation is refused.

Disk space is claimed for each body before the body is written to the journal. So several bodies that arrive at the same
time cannot claim the same free bytes.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tinsmith_rpc import worker_pb2

from tinsmith_trainer.disk.free_space import MIB, DiskRoom, NoRoom
from tinsmith_trainer.errors import JournalFull
from tinsmith_trainer.oplog.model_queues import ModelQueues

BACKLOG_OPERATIONS = 256
BACKLOG_DELAY_SECONDS = 20.0
BACKLOG_POLL_SECONDS = 0.05


class Admission:
    """The rules of admission. Used by the event loop only."""

    def __init__(self, room: DiskRoom, queues: ModelQueues, directory: Path) -> None:
        self._room = room
        self._queues = queues
        self._directory = directory

    async def claim(self, request: worker_pb2.SubmitRequest, owner: str) -> int:
        """Claim disk space for the body. Return the number of claimed bytes.

        The caller releases the claimed bytes when the body is on disk.

        If the operation must wait for other operations, it is acknowledged late, not refused, because the operation
        could be the chunk for which other chunks wait. Raises JournalFull.
        """
        deadline = time.monotonic() + BACKLOG_DELAY_SECONDS
        while self._waits_for_others(request, owner) and time.monotonic() < deadline:
            await asyncio.sleep(BACKLOG_POLL_SECONDS)
        if _makes_room(request):
            return 0
        claimed_bytes = _disk_bytes(request)
        try:
            if not self._leaves_a_share(request, owner):
                raise self._full(request, owner)
            self._room.claim(claimed_bytes)
        except NoRoom as error:
            raise self._full(request, owner) from error
        return claimed_bytes

    def release(self, claimed_bytes: int) -> None:
        """Release claimed bytes. Thread-safe."""
        self._room.release(claimed_bytes)

    def _waits_for_others(self, request: worker_pb2.SubmitRequest, owner: str) -> bool:
        """Return whether too many or too large operations of the model or the owner wait before this operation."""
        if self._queues.backlog(request.model_id) >= BACKLOG_OPERATIONS:
            return True
        return self._queues.waiting_bytes(owner) > 0 and not self._leaves_a_share(request, owner)

    def _leaves_a_share(self, request: worker_pb2.SubmitRequest, owner: str) -> bool:
        """Return whether the space that stays free is at least as large as the waiting operations of this owner.

        So an owner with a long backlog leaves space for later owners. The operation for which other operations wait is
        always accepted. Chunks arrive out of order. If the first missing chunk were refused, the other chunks would
        never run, and the space of the chunks would never become free.
        """
        if _makes_room(request) or self._queues.is_next_missing(request.model_id, request.seq_id):
            return True
        return self._room.has_room_for(_disk_bytes(request) + self._queues.waiting_bytes(owner))

    def _full(self, request: worker_pb2.SubmitRequest, owner: str) -> JournalFull:
        waiting = self._queues.waiting_bytes(owner)
        if waiting and self._room.has_room_for(_disk_bytes(request)):
            return JournalFull(
                f"The volume {self._directory} has no more room for operations of this tenant, whose waiting ones take "
                f"{waiting / MIB:.1f} MiB: retry when some of them have run. Nothing was accepted."
            )
        return JournalFull(f"The volume {self._directory} is full: make room, then retry. Nothing was accepted.")


def _makes_room(request: worker_pb2.SubmitRequest) -> bool:
    """Return whether the operation frees space. Only operations that free space may use the reserve."""
    return request.kind == worker_pb2.RELEASE_MODEL


def _disk_bytes(request: worker_pb2.SubmitRequest) -> int:
    """Return the number of bytes that the request takes on disk.

    A body takes space twice: in the journal's write-ahead log, and then in the journal's file.
    """
    return 2 * len(request.payload)
