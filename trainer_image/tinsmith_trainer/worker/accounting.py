"""What a worker says of who used it: tokens that nobody has written down yet, and when operations came and ended."""

from __future__ import annotations

import asyncio
import base64

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.errors import JournalFull, ServerError
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import OperationResult
from tinsmith_trainer.oplog.model_queue import ModelQueue
from tinsmith_trainer.oplog.timeline import MOST_SPANS, read_timeline
from tinsmith_trainer.sampling.sample_queue import Samples
from tinsmith_trainer.usage_meter import UsageMeter

log = structlog.get_logger(__name__)

META_KEY = "usage"
"""Of what a clean stop has left, in the journal's `meta`."""


class Accounting:
    """Numbers are kept in memory, since a write for each operation would cost more than they are worth; a clean stop
    leaves them in the journal for the next process."""

    def __init__(self, journal: Journal) -> None:
        self.meter = UsageMeter()
        self._journal = journal
        if journal.read(lambda db: journal_tables.get_meta(db, META_KEY)).result():
            self._take_left()

    def note_result(self, queue: ModelQueue, result: OperationResult) -> None:
        """Of an operation that has run for the first time. From any thread."""
        self.meter.add(queue.model_id, queue.tenant, worker_pb2.TRAINING_TOKENS, result.input_tokens)

    def keep(self) -> None:
        """At a clean stop, when nothing is counted any more."""
        left = base64.b64encode(self.meter.take().SerializeToString()).decode()
        if not left:
            return
        try:
            self._journal.write(lambda db: journal_tables.set_meta(db, META_KEY, left)).result()
        except (JournalFull, ServerError) as error:
            log.warning("usage is not kept", reason=str(error))

    async def timeline(self, session_id: str, samples: Samples | None) -> worker_pb2.TimelineReply:
        """Of the session's operations and samples, the newest where there are more than a reply holds."""
        spans = await asyncio.wrap_future(self._journal.read(lambda db: read_timeline(db, session_id)))
        if samples is not None:
            spans += samples.timeline(session_id)
        return worker_pb2.TimelineReply(spans=sorted(spans, key=lambda span: span.submitted)[-MOST_SPANS:])

    def _take_left(self) -> None:
        """Forgotten before it is counted: a process that is killed between loses it, and none counts it twice."""
        try:
            left = self._journal.write(_take_left).result()
        except JournalFull as error:
            log.warning("usage is left for the next start", reason=str(error))
        else:
            self.meter.give_back(worker_pb2.TakeUsageReply.FromString(left))


def _take_left(db: journal_tables.Database) -> bytes:
    left = journal_tables.get_meta(db, META_KEY)
    if left:
        journal_tables.set_meta(db, META_KEY, "")
    return base64.b64decode(left or "")
