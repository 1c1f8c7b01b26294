"""What a worker keeps of the past, and the rounds in which it forgets the rest."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from tinsmith_trainer.checkpoints.snapshots import SnapshotFolder
from tinsmith_trainer.disk_room import DiskRoom
from tinsmith_trainer.errors import JournalFull, ServerError
from tinsmith_trainer.oplog.forgetting import Forgetting
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.model_queues import ModelQueues
from tinsmith_trainer.oplog.retention import Retention

log = structlog.get_logger(__name__)

KEEP_RESULTS_SECONDS = 72 * 3600.0
KEEP_RESULT_BYTES = 2 * 1024**3
KEEP_OPERATIONS = 5000
"""Of each model, below its snapshot: far more than a program may have under way."""
KEEP_ALL_SECONDS = 900.0
"""However many those are, and however large: a client that lost an answer asks again within minutes."""
KEEP_CLOSED_MODELS = 5000
"""Of each tenant: released ones, and those that could not be created, which cost a client nothing."""
TIDY_SECONDS = 60.0


class SteadyClock:
    """Unix seconds that never run ahead of the time in which this process has run.

    A clock that is set forward, by a bad time server or a machine that wakes, makes no result older than clients had
    time to ask for it. One that is set back is followed: what finishes then is as young as it says.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._started_at = wall() - monotonic()

    def __call__(self) -> float:
        now = self._wall()
        self._started_at = min(self._started_at, now - self._monotonic())
        return self._started_at + self._monotonic()


class Tidying:
    """One round at a time, on the event loop."""

    def __init__(
        self,
        journal: Journal,
        queues: ModelQueues,
        snapshots: SnapshotFolder,
        room: DiskRoom,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`room`: that of the journal's disk."""
        self._forgetting = Forgetting(journal)
        self._queues = queues
        self._snapshots = snapshots
        self._room = room
        self._clock = clock or SteadyClock()

    async def round(self, acknowledged_event_id: int) -> None:
        """Forgets results, operations, events and released models that are past their time."""
        limits = (KEEP_RESULTS_SECONDS, KEEP_RESULT_BYTES, KEEP_OPERATIONS, KEEP_ALL_SECONDS, KEEP_CLOSED_MODELS)
        self._queues.forget_keys(time.monotonic() - KEEP_ALL_SECONDS)
        retention = Retention(*limits, is_short=not self._room.has_room_for(0))
        try:
            gone = await self._forgetting.round(retention, acknowledged_event_id, self._clock())
        except (JournalFull, ServerError) as error:
            log.warning("nothing more is forgotten in this round", reason=str(error))
            return
        except Exception:  # such as a page that cannot be read: it is no reason to end what trains
            log.exception("nothing more is forgotten in this round")
            return
        for queue in self._queues.forget(gone):
            if queue.snapshot is not None:  # of one that was corrupted
                self._snapshots.remove(queue.snapshot.name)
