"""What a worker keeps of the past, and the rounds in which it forgets the rest."""

from __future__ import annotations

import time

import structlog

from tinsmith_trainer.checkpoints.snapshots import SnapshotFolder
from tinsmith_trainer.errors import JournalFull, ServerError
from tinsmith_trainer.oplog.forgetting import Forgetting, Retention
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.model_queues import ModelQueues

log = structlog.get_logger(__name__)

KEEP_RESULTS_SECONDS = 72 * 3600.0
KEEP_RESULT_BYTES = 2 * 1024**3
KEEP_OPERATIONS = 5000
"""Of each model, below its snapshot: far more than a program may have under way."""
KEEP_ALL_SECONDS = 900.0
"""However many those are: a client that lost an answer asks again within minutes."""
TIDY_SECONDS = 60.0


class Tidying:
    """One round at a time, on the event loop."""

    def __init__(self, journal: Journal, queues: ModelQueues, snapshots: SnapshotFolder) -> None:
        self._forgetting = Forgetting(journal)
        self._queues = queues
        self._snapshots = snapshots

    async def round(self, acknowledged_event_id: int) -> None:
        """Forgets results, operations, events and released models that are past their time."""
        retention = Retention(KEEP_RESULTS_SECONDS, KEEP_RESULT_BYTES, KEEP_OPERATIONS, KEEP_ALL_SECONDS)
        try:
            gone = await self._forgetting.round(retention, acknowledged_event_id, time.time())
        except (JournalFull, ServerError) as error:
            log.warning("nothing more is forgotten in this round", reason=str(error))
            return
        for queue in self._queues.forget(gone):
            if queue.snapshot is not None:  # of one that was corrupted
                self._snapshots.remove(queue.snapshot.name)
