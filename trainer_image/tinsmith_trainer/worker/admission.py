"""Admission of operations. A long backlog delays the acknowledgement, and a full disk refuses operations.

The space of each body is promised before the journal has the body. So bodies that arrive together do not all count the
same free bytes.
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
    """The rules of admission. Used by the event loop alone."""

    def __init__(self, room: DiskRoom, queues: ModelQueues, directory: Path) -> None:
        self._room = room
        self._queues = queues
        self._directory = directory

    async def claim(self, request: worker_pb2.SubmitRequest, owner: str) -> int:
        """Promise disk space for the body. Return the promised bytes. Release them when the body is on disk.

        An operation that waits for others is acknowledged late instead of being refused. A refusal could hit the very
        chunk for which a backlog waits. Raises JournalFull.
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
        """Release promised bytes. Thread-safe."""
        self._room.release(claimed_bytes)

    def _waits_for_others(self, request: worker_pb2.SubmitRequest, owner: str) -> bool:
        """Return whether too many or too large operations of the model or its owner wait before this operation."""
        if self._queues.backlog(request.model_id) >= BACKLOG_OPERATIONS:
            return True
        return self._queues.waiting_bytes(owner) > 0 and not self._leaves_a_share(request, owner)

    def _leaves_a_share(self, request: worker_pb2.SubmitRequest, owner: str) -> bool:
        """Return whether other owners keep as much free space as the waiting operations of this owner take.

        So an owner with a long backlog leaves space to later owners. The number for which operations wait is exempt.
        Chunks arrive out of order, and without this number the other chunks would never run and free their space.
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
    """Return whether the operation frees space. The reserve is for such operations."""
    return request.kind == worker_pb2.RELEASE_MODEL


def _disk_bytes(request: worker_pb2.SubmitRequest) -> int:
    """Return the bytes on disk. A body is written to the journal's log, and then from the log to the file."""
    return 2 * len(request.payload)
