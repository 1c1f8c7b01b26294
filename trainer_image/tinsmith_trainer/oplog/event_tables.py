"""Events that a server hears of, names that models have saved under, and interruptions, as rows of the journal.

Functions here run inside `Journal.read` or `write`.
"""

from __future__ import annotations

from collections.abc import Callable

from tinsmith_trainer.oplog.journal_tables import Database
from tinsmith_trainer.process.in_flight_marker import InFlightWork, Interruption


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


def count_interruption(db: Database, interruption: Interruption) -> None:
    """One life ends once, however often it is counted.

    Of several works in one call it is not known whose end it was: each becomes a suspect, with a count of 0.
    """
    suspects = interruption.suspects
    counts = int(len(suspects) == 1)
    db.executemany(
        "INSERT INTO interruptions VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (model_id, seq_id, purpose) DO UPDATE SET"
        " count = count + excluded.count, life = excluded.life, last_sign = excluded.last_sign"
        " WHERE life <> excluded.life",
        [
            (work.model_id, work.seq_id, work.purpose, counts, interruption.life, interruption.last_sign)
            for work in suspects
        ],
    )


def read_interruptions(db: Database) -> dict[InFlightWork, tuple[int, str]]:
    """How often a process ended at which work, and what its last sign was then."""
    rows = db.execute("SELECT purpose, model_id, seq_id, count, last_sign FROM interruptions")
    return {InFlightWork(*work): (count, last_sign) for *work, count, last_sign in rows}


def forget_interruptions(db: Database, work: InFlightWork) -> None:
    db.execute(
        "DELETE FROM interruptions WHERE model_id = ? AND seq_id = ? AND purpose = ?",
        (work.model_id, work.seq_id, work.purpose),
    )


def forget_all_interruptions(db: Database) -> None:
    db.execute("DELETE FROM interruptions")
