"""The limits on the data that a worker keeps about finished operations, and the rounds that delete older data."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import structlog

from tinsmith_trainer.checkpoints.snapshots import SnapshotFolder
from tinsmith_trainer.disk.free_space import DiskRoom
from tinsmith_trainer.errors import JournalFull, ServerError
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_retention import JournalRetention, Retention
from tinsmith_trainer.oplog.model_queues import ModelQueues

log = structlog.get_logger(__name__)

KEEP_RESULTS_SECONDS = 72 * 3600.0
KEEP_RESULT_BYTES = 2 * 1024**3
KEEP_OPERATIONS = 5000
"""For each model, the number of operations that are kept although the snapshot covers them.

A client program has far fewer operations in flight.
"""
KEEP_ALL_SECONDS = 900.0
"""The age up to which all results are kept, in any number and of any size.

A client that lost an answer asks again within minutes.
"""
KEEP_CLOSED_MODELS = 5000
"""The number of closed models that are kept for each tenant. A client can create and release models at no cost."""
TIDY_SECONDS = 60.0
CLOCK_TOLERANCE_SECONDS = 1.0
"""The largest accepted difference between the counted time and the machine's clock, which a time server corrects."""


class SteadyClock:
    """A clock for the age of results. The clock counts the time in which this process has run.

    The machine's clock may be set forward, by a wrong time server or after the machine's sleep. All earlier results
    then still count as new, so that clients can request the results. Later results have the time of the changed clock.
    Without this rule, a machine that sleeps at night would keep more data each day. If the clock is set back, earlier
    results seem younger.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        # Pairs of Unix seconds minus monotonic seconds, and the monotonic moment from which the difference is valid.
        # Both ascend.
        self._offsets = deque([(-math.inf, wall() - monotonic())])

    def ago(self, seconds: float) -> float:
        """Return the time in Unix seconds at which operations of this age finished."""
        self._look()
        moment = self._monotonic() - seconds
        return moment + next(offset for since, offset in reversed(self._offsets) if since <= moment)

    def _look(self) -> None:
        now = self._monotonic()
        since, offset = now, self._wall() - now
        while self._offsets and self._offsets[-1][1] > offset:
            since, _ = self._offsets.pop()
        if not self._offsets or offset - self._offsets[-1][1] > CLOCK_TOLERANCE_SECONDS:
            self._offsets.append((since, offset))
        while len(self._offsets) > 1 and self._offsets[1][0] <= now - KEEP_RESULTS_SECONDS:
            self._offsets.popleft()
            self._offsets[0] = (-math.inf, self._offsets[0][1])


class Tidying:
    """The rounds of deletion, one at a time, on the event loop."""

    def __init__(
        self,
        journal: Journal,
        queues: ModelQueues,
        snapshots: SnapshotFolder,
        room: DiskRoom,
        clock: SteadyClock | None = None,
    ) -> None:
        """Create the rounds. `room` is the free space of the journal's disk."""
        self._retention = JournalRetention(journal)
        self._queues = queues
        self._snapshots = snapshots
        self._room = room
        self._clock = clock or SteadyClock()

    async def round(self, acknowledged_event_id: int) -> None:
        """Delete expired results, operations, events and released models."""
        limits = (KEEP_RESULTS_SECONDS, KEEP_RESULT_BYTES, KEEP_OPERATIONS, KEEP_ALL_SECONDS, KEEP_CLOSED_MODELS)
        self._queues.forget_keys(time.monotonic() - KEEP_ALL_SECONDS)
        retention = Retention(*limits, is_short=not self._room.has_room_for(0))
        try:
            model_ids = await self._retention.round(retention, acknowledged_event_id, self._clock.ago)
        except (JournalFull, ServerError) as error:
            log.warning("nothing more is forgotten in this round", reason=str(error))
            return
        except Exception:  # for example a page that cannot be read; it must not end the training
            log.exception("nothing more is forgotten in this round")
            return
        for queue in self._queues.forget(model_ids):
            if queue.snapshot is not None:  # the snapshot of a model that was corrupted
                self._snapshots.remove(queue.snapshot.name)
