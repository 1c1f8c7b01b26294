"""Events that a server hears of, and the names that models have saved under, as rows of the journal.

Functions here run inside `Journal.read` or `write`.
"""

from __future__ import annotations

from collections.abc import Callable

from tinsmith_trainer.oplog.journal_tables import Database


def add_event(db: Database, build: Callable[[int], bytes]) -> int:
    """Appends an event whose body knows its own id."""
    db.execute("INSERT INTO events (body) VALUES (x'')")
    event_id = db.last_insert_rowid()
    db.execute("UPDATE events SET body = ? WHERE event_id = ?", (build(event_id), event_id))
    return event_id


def read_events(db: Database, after: int, limit: int = 256) -> list[bytes]:
    rows = db.execute("SELECT body FROM events WHERE event_id > ? ORDER BY event_id LIMIT ?", (after, limit))
    return [bytes(body) for (body,) in rows]


def forget_events(db: Database, up_to: int) -> None:
    # A cursor beyond the last event is another volume's: it says nothing of these.
    db.execute(
        "DELETE FROM events WHERE event_id <= ?1 AND ?1 <= (SELECT seq FROM sqlite_sequence WHERE name = 'events')",
        (up_to,),
    )


def note_saved_name(db: Database, model_id: str, kind: int, name: str, event_id: int) -> None:
    db.execute(
        "INSERT INTO saved_names VALUES (?, ?, ?, ?)"
        " ON CONFLICT (model_id, kind, name) DO UPDATE SET event_id = excluded.event_id",
        (model_id, kind, name, event_id),
    )


def saved_name_event(db: Database, model_id: str, kind: int, name: str) -> int:
    """The event of the latest save under this name; 0: there is none."""
    row = db.execute(
        "SELECT event_id FROM saved_names WHERE model_id = ? AND kind = ? AND name = ?", (model_id, kind, name)
    ).fetchone()
    return 0 if row is None else int(row[0])
