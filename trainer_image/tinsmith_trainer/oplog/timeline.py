"""When the operations of a session's models came, began and ended, as far as the journal has rows of them."""

from __future__ import annotations

from tinsmith_rpc import worker_pb2

from tinsmith_trainer.oplog.journal_tables import Database

MOST_SPANS = 20_000
"""The newest: a reply has some megabytes at most."""

_NAMES = {
    worker_pb2.CREATE_MODEL: "create_model",
    worker_pb2.LOAD_MODEL: "load_model",
    worker_pb2.FORWARD_BACKWARD: "forward_backward",
    worker_pb2.OPTIM_STEP: "optim_step",
    worker_pb2.SAVE_WEIGHTS: "save_weights",
    worker_pb2.LOAD_WEIGHTS: "load_weights",
    worker_pb2.RELEASE_MODEL: "release_model",
}


def read_timeline(db: Database, session_id: str, most: int = MOST_SPANS) -> list[worker_pb2.Span]:
    """Oldest first. Models are told by their ids, `<session>:<...>`."""
    rows = db.execute(
        "SELECT model_id, seq_id, kind, forward_only, accepted_at, started_at, finished_at, status FROM operations"
        " WHERE model_id >= ?1 AND model_id < ?2 ORDER BY accepted_at DESC LIMIT ?3",
        (f"{session_id}:", f"{session_id};", most),
    )
    return [_span(row) for row in rows][::-1]


def _span(row: tuple) -> worker_pb2.Span:  # type: ignore[type-arg]
    model_id, seq_id, kind, forward_only, accepted_at, started_at, finished_at, status = row
    return worker_pb2.Span(
        owner=model_id,
        seq_id=seq_id,
        name="forward" if forward_only else _NAMES[kind],
        submitted=accepted_at,
        started=started_at,
        ended=finished_at,
        failed=status in ("failed", "late"),
    )
