"""Usage, timelines and traces: tokens that no server has recorded yet, and the times of operations."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterable
from typing import Any

import structlog
from tinsmith_rpc import tracing, worker_pb2

from tinsmith_trainer.errors import JournalFull, ServerError
from tinsmith_trainer.oplog import journal_tables
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import OperationResult
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.process.usage_meter import UsageMeter
from tinsmith_trainer.sampling.sample_queue import Samples

log = structlog.get_logger(__name__)

META_KEY = "usage"
"""The key of the counts that an orderly stop stores in the journal's `meta`."""
MOST_SPANS = 20_000
"""The limit on spans in a reply; this many spans are some megabytes. The newest spans are returned."""

_NAMES = {
    worker_pb2.CREATE_MODEL: "create_model",
    worker_pb2.LOAD_MODEL: "load_model",
    worker_pb2.FORWARD_BACKWARD: "forward_backward",
    worker_pb2.OPTIM_STEP: "optim_step",
    worker_pb2.SAVE_WEIGHTS: "save_weights",
    worker_pb2.LOAD_WEIGHTS: "load_weights",
    worker_pb2.RELEASE_MODEL: "release_model",
}


def record_in_trace(entry: Entry, result: OperationResult) -> None:
    """Record an operation whose result is on disk: its wait, its time on the engine, and the commit of the result."""
    operation, now = entry.operation, time.time()
    about: dict[str, tracing.Value] = {
        "tinsmith.model_id": operation.model_id,
        "tinsmith.position": operation.seq_id,
    }
    failure = result.failure.message if result.failure is not None else ""
    name, accepted = operation_name(operation.kind, entry.forward_only), operation.accepted_at
    whole = tracing.record(name, operation.traceparent, accepted, now, about, failure)
    started, ended = result.started_at or now, result.ended_at or now
    tracing.record("wait for the turn", whole, accepted, started)
    on_engine = {"tinsmith.engine_seconds": result.seconds, "tinsmith.tokens": result.input_tokens}
    tracing.record("engine", whole, started, ended, on_engine)
    tracing.record("commit to the journal", whole, ended, now)


def operation_name(kind: worker_pb2.OperationKind.ValueType, forward_only: bool | None) -> str:
    """Return the name of an operation in timelines and traces."""
    return "forward" if forward_only else _NAMES[kind]


class Accounting:
    """The counts of used tokens.

    Counts are kept in memory, because a write for each operation would cost more than the counts are worth. An orderly
    stop stores the counts in the journal for the next process.
    """

    def __init__(self, journal: Journal) -> None:
        self.meter = UsageMeter()
        self._journal = journal
        if journal.read(lambda db: journal_tables.get_meta(db, META_KEY)).result():
            self._take_left()

    def note_result(self, queue: ModelQueue, result: OperationResult) -> None:
        """Count the tokens of an operation after its first run. Thread-safe."""
        self.meter.add(queue.model_id, queue.tenant, worker_pb2.TRAINING_TOKENS, result.input_tokens)

    def keep(self) -> None:
        """Store the counts during an orderly stop. Call this after the last count."""
        left = base64.b64encode(self.meter.take().SerializeToString()).decode()
        if not left:
            return
        try:
            self._journal.write(lambda db: journal_tables.set_meta(db, META_KEY, left)).result()
        except (JournalFull, ServerError) as error:
            log.warning("usage is not kept", reason=str(error))

    async def timeline(
        self, session_id: str, queues: Iterable[ModelQueue], samples: Samples | None
    ) -> worker_pb2.TimelineReply:
        """Return the session's operations and samples.

        If the session has too many operations and samples for a reply, return only the newest.
        """
        rows = await asyncio.wrap_future(self._journal.read(lambda db: read_timeline(db, session_id)))
        own = {queue.model_id: queue for queue in queues if queue.model_id.startswith(f"{session_id}:")}
        plain = {model_id: queue.plain.positions for model_id, queue in own.items()}
        # This does not run in the journal's thread, because submits wait for that thread.
        spans = await asyncio.to_thread(lambda: [_span(row) for row in rows])
        spans += [
            _waiting(entry) for queue in own.values() for entry in list(queue.entries.values()) if not entry.is_finished
        ]
        for span in spans:
            if span.owner in plain:
                span.seq_id = plain[span.owner].seq_id_of(span.seq_id)
        if samples is not None:
            spans += samples.timeline(session_id)
        return worker_pb2.TimelineReply(spans=sorted(spans, key=lambda span: span.submitted)[-MOST_SPANS:])

    def _take_left(self) -> None:
        """Read the stored counts, and delete the counts before they are used.

        A process that is killed between deletion and use loses the counts, but usage is never counted twice.
        """
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


def read_timeline(db: journal_tables.Database, session_id: str, most: int = MOST_SPANS) -> list[Any]:
    """Return the rows of operations that have ended, newest first.

    The IDs of a session's models begin with `<session>:`.
    """
    return db.execute(
        "SELECT model_id, seq_id, kind, forward_only, accepted_at, started_at, finished_at, status FROM operations"
        " INDEXED BY timeline WHERE finished_at IS NOT NULL AND model_id >= ?1 AND model_id < ?2"
        " ORDER BY accepted_at DESC LIMIT ?3",
        (f"{session_id}:", f"{session_id};", most),
    ).fetchall()


def _waiting(entry: Entry) -> worker_pb2.Span:
    """Return the timeline span of an operation that waits or runs."""
    operation = entry.operation
    return worker_pb2.Span(
        owner=operation.model_id,
        seq_id=operation.seq_id,
        name=_NAMES[operation.kind],
        submitted=operation.accepted_at,
        started=entry.started_at or 0.0,
    )


def _span(row: Any) -> worker_pb2.Span:
    model_id, seq_id, kind, forward_only, accepted_at, started_at, finished_at, status = row
    return worker_pb2.Span(
        owner=model_id,
        seq_id=seq_id,
        name=operation_name(kind, forward_only),
        submitted=accepted_at,
        started=started_at,
        ended=finished_at,
        failed=status in ("failed", "late"),
    )
