"""What the journal forgets while a model lives: results that are past their time, and whole rows below the snapshot.

Of a row that is gone the number remains, so that its operation never runs again: who asks for its result hears that it
is gone, and who submits it again is acknowledged as before. All is done in steps of milliseconds, since whatever else
goes to the disk waits for each.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TypeVar

from tinsmith_trainer.oplog import event_tables, journal_tables
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import Database, StoredModel

T = TypeVar("T")

ROWS_IN_A_STEP = 250
BYTES_IN_A_STEP = 16 * 1024**2
SIZES_IN_A_STEP = 1000


@dataclass(frozen=True, slots=True)
class Retention:
    """How long results can be read: `seconds`, if those of all models fit into `result_bytes`.

    Below its snapshot a model keeps the rows of its newest `operations`, and all that finished less than
    `least_seconds` ago; of the others only their numbers, whatever their age.
    """

    seconds: float
    result_bytes: int
    operations: int
    least_seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """An operation that has a result and is never run again."""

    seq_id: int
    finished_at: float
    result_bytes: int


@dataclass(frozen=True, slots=True)
class Horizons:
    """Times in Unix seconds: what finished at or before is past its time, or may make room for newer ones."""

    expired: float
    crowded_out: float

    def is_spent(self, operation: Finished, newest_beyond: int) -> bool:
        """Nobody is promised its result any more. `newest_beyond`: the highest number beyond the newest ones."""
        if operation.seq_id <= newest_beyond and operation.finished_at <= self.crowded_out:
            return True
        return operation.finished_at <= self.expired


class Forgetting:
    """One round at a time, on the event loop; the journal's thread does the steps.

    What is found to be spent stays so: it can go in a later transaction than the one that found it.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def round(self, retention: Retention, acknowledged_event_id: int, now: float) -> list[str]:
        """Returns the released models of which every trace is gone. Raises JournalFull, or ServerError, in between."""
        expired = max(now - retention.seconds, await self._newest_that_does_not_fit(retention.result_bytes))
        horizons = Horizons(expired, now - retention.least_seconds)
        await self._give_up_corrupted(now - retention.seconds)
        for model in await self._read(journal_tables.read_models):
            await self._forget_rows(model, horizons, retention.operations)
        await self._drop_results(expired)
        await self._write(lambda db: event_tables.forget_events(db, acknowledged_event_id))
        return await self._write(forget_released_models)

    async def _newest_that_does_not_fit(self, result_bytes: int) -> float:
        """When the newest result finished that does not fit beside the newer ones."""
        before, room = (math.inf, journal_tables.HIGHEST_NUMBER), result_bytes
        while sizes := await self._read(lambda db, before=before: result_sizes(db, before)):  # type: ignore[misc]
            for finished_at, row, size in sizes:
                room -= size
                if room < 0:
                    return finished_at
                before = finished_at, row
        return -math.inf

    async def _give_up_corrupted(self, horizon: float) -> None:
        """From now on they are as released ones: their snapshots bring nothing back."""
        for model in await self._read(journal_tables.read_models):
            if model.phase == "corrupted" and (model.corrupted_at or 0.0) <= horizon:
                await self._write(partial(journal_tables.forget_model, model_id=model.model_id))

    async def _forget_rows(self, model: StoredModel, horizons: Horizons, keep: int) -> None:
        while numbers := await self._read(lambda db: spent_numbers(db, model, horizons, keep)):
            await self._write(lambda db, numbers=numbers: forget_rows(db, model.model_id, numbers))  # type: ignore[misc]

    async def _drop_results(self, expired: float) -> None:
        """Of rows that stay, since a start runs them again."""
        while rows := await self._read(lambda db: rows_with_results(db, expired)):
            await self._write(lambda db, rows=rows: drop_results(db, rows))  # type: ignore[misc]

    async def _read(self, run: Callable[[Database], T]) -> T:
        return await asyncio.wrap_future(self._journal.read(run))

    async def _write(self, run: Callable[[Database], T]) -> T:
        return await asyncio.wrap_future(self._journal.write(run, uses_reserve=True))


# ---- in the journal's thread


def spent_numbers(db: Database, model: StoredModel, horizons: Horizons, keep: int) -> list[int]:
    """Of the model's lowest numbers, up to the first one that is not spent; not more than one step's."""
    beyond = _newest_beyond(db, model, keep)
    spent = takewhile(lambda operation: horizons.is_spent(operation, beyond), _oldest(db, model))
    return list(_for_one_step((operation.seq_id, operation.result_bytes) for operation in spent))


def _newest_beyond(db: Database, model: StoredModel, keep: int) -> int:
    row = db.execute(
        "SELECT seq_id FROM operations WHERE model_id = ? AND seq_id <= ? ORDER BY seq_id DESC LIMIT 1 OFFSET ?",
        (model.model_id, model.spent_up_to, keep),
    ).fetchone()
    return -1 if row is None else int(row[0])


def _oldest(db: Database, model: StoredModel) -> Iterable[Finished]:
    """In the order of their numbers, up to the first one that has no result."""
    rows = db.execute(
        "SELECT seq_id, finished_at, result_bytes FROM operations WHERE model_id = ? AND seq_id <= ?"
        " ORDER BY seq_id LIMIT ?",
        (model.model_id, model.spent_up_to, ROWS_IN_A_STEP),
    )
    finished = takewhile(lambda row: row[1] is not None, rows)
    return (Finished(int(seq_id), float(at), int(result_bytes or 0)) for seq_id, at, result_bytes in finished)


def _for_one_step(sized: Iterable[tuple[int, int]]) -> Iterator[int]:
    """The first at least: what lies on very many pages takes long however few rows it is."""
    room = BYTES_IN_A_STEP
    for number, result_bytes in sized:
        yield number
        room -= result_bytes
        if room < 0:
            return


def forget_rows(db: Database, model_id: str, numbers: Sequence[int]) -> None:
    """Of these operations only the numbers remain."""
    forgotten = journal_tables.read_forgotten(db, model_id)
    for seq_id in numbers:
        forgotten.add(seq_id)
    db.execute("DELETE FROM forgotten WHERE model_id = ?", (model_id,))
    db.executemany("INSERT INTO forgotten VALUES (?, ?, ?)", [(model_id, *ends) for ends in forgotten])
    db.executemany("DELETE FROM operations WHERE model_id = ? AND seq_id = ?", [(model_id, one) for one in numbers])


def result_sizes(db: Database, before: tuple[float, int]) -> list[tuple[float, int, int]]:
    """When each finished, its row, and its bytes: the newest first, `SIZES_IN_A_STEP` at most, from the index alone."""
    rows = db.execute(
        "SELECT finished_at, id, result_bytes FROM operations WHERE result IS NOT NULL AND (finished_at, id) < (?, ?)"
        " ORDER BY finished_at DESC, id DESC LIMIT ?",
        (*before, SIZES_IN_A_STEP),
    )
    return [(float(finished_at), int(row), int(size)) for finished_at, row, size in rows]


def rows_with_results(db: Database, expired: float) -> list[int]:
    """The oldest, and not more than one step's."""
    rows = db.execute(
        "SELECT id, result_bytes FROM operations WHERE result IS NOT NULL AND finished_at <= ?"
        " ORDER BY finished_at, id LIMIT ?",
        (expired, ROWS_IN_A_STEP),
    )
    return list(_for_one_step((int(row), int(result_bytes)) for row, result_bytes in rows))


def drop_results(db: Database, rows: Sequence[int]) -> None:
    db.executemany("UPDATE operations SET result = NULL WHERE id = ?", [(row,) for row in rows])


def forget_released_models(db: Database) -> list[str]:
    """Every trace of models that were released, and whose results are all past their time; returns them."""
    rows = db.execute(
        "SELECT model_id FROM models WHERE state = 'released'"
        " AND NOT EXISTS (SELECT 1 FROM operations WHERE operations.model_id = models.model_id)"
    )
    forgotten = [str(model_id) for (model_id,) in rows.fetchall()]
    for table in ("forgotten", "saved_names", "interruptions", "models"):
        db.executemany(f"DELETE FROM {table} WHERE model_id = ?", [(model_id,) for model_id in forgotten])
    return forgotten
