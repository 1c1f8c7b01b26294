"""The data that the journal deletes while a model exists: expired results, and rows that the snapshot covers.

The number of a deleted row is kept, so that the operation never runs again. A client that polls a deleted result gets a
message that the result is deleted; a repeated submission is acknowledged as before. All other writes wait for a step of
a deletion, so each step is limited to milliseconds.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TypeVar

from tinsmith_trainer.oplog import journal_tables, result_tables
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import Database, StoredModel

T = TypeVar("T")

ROWS_IN_A_STEP = 250
BYTES_IN_A_STEP = 16 * 1024**2
SIZES_IN_A_STEP = 1000
MODELS_IN_A_STEP = 250


class JournalRetention:
    """Rounds of deletion, one at a time, on the event loop. The journal's thread runs the steps of a round.

    The permission to delete a row never ends, so a later transaction can delete the row.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def round(self, retention: Retention, acknowledged_event_id: int, ago: Callable[[float], float]) -> list[str]:
        """Run a round of deletion. Return the released models that have no data left.

        `ago` is `SteadyClock.ago`. Raises JournalFull or ServerError between two steps.
        """
        horizons = Horizons(ago(retention.seconds), ago(retention.least_seconds))
        models = await self._read(journal_tables.read_models)
        await self._give_up_corrupted(models, horizons.expired)
        surplus = surplus_models(models, retention.closed_models)
        early = Horizons(horizons.crowded_out, horizons.crowded_out)
        for is_surplus, limits in ((False, horizons), (True, early)):
            chosen = [model for model in models if (model.model_id in surplus) is is_surplus]
            for some in journal_tables.in_batches(chosen, MODELS_IN_A_STEP):
                await self._forget_rows(some, limits, retention.operations)
        bytes_of_owners = await self._drop_expired(horizons.expired, owners := _owners(models))
        excess = excess_bytes(bytes_of_owners, retention.result_bytes)
        if excess:
            await self._drop_crowded_out(excess, owners, math.inf if retention.is_short else horizons.crowded_out)
        await self._write(lambda db: result_tables.forget_events(db, acknowledged_event_id))
        return await self._write(forget_released_models)

    async def _give_up_corrupted(self, models: Iterable[StoredModel], horizon: float) -> None:
        """Mark a corrupted model as released, so that later rounds delete it, if the wait for the snapshot is over."""
        for model in models:
            if model.phase == "corrupted" and (model.corrupted_at or 0.0) <= horizon:
                await self._write(partial(result_tables.forget_model, model_id=model.model_id))

    async def _forget_rows(self, models: Sequence[StoredModel], horizons: Horizons, keep: int) -> None:
        while spent := await self._read(lambda db: spent_of_models(db, models, horizons, keep)):
            for model_id, numbers in spent.items():
                await self._write(partial(forget_rows, model_id=model_id, numbers=numbers))

    async def _drop_expired(self, expired: float, owners: Mapping[str, str]) -> Counter[str]:
        """Delete expired results, but keep the rows, which the next start needs.

        For each owner, return the number of bytes of the remaining results.
        """
        sizes = Counter[str]()
        async for page in self._pages():
            await self._drop([result for result in page if result.finished_at <= expired])
            for result in page:
                if result.finished_at > expired:
                    sizes[owners.get(result.model_id, result.model_id)] += result.size_bytes
        return sizes

    async def _drop_crowded_out(self, excess: dict[str, int], owners: Mapping[str, str], not_after: float) -> None:
        async for page in self._pages():
            await self._drop(list(crowded_out(page, excess, owners, not_after)))

    async def _pages(self) -> AsyncIterator[list[KeptResult]]:
        """Yield all results in the order of operations.

        The order of operations may differ from the order of the finish times.
        """
        after = -1
        while page := await self._read(partial(read_results, after=after)):
            yield page
            after = page[-1].row

    async def _drop(self, results: list[KeptResult]) -> None:
        while results:
            rows = list(_for_one_step((result.row, result.size_bytes) for result in results[:ROWS_IN_A_STEP]))
            await self._write(partial(drop_results, rows=rows))
            results = results[len(rows) :]

    async def _read(self, run: Callable[[Database], T]) -> T:
        return await asyncio.wrap_future(self._journal.read(run))

    async def _write(self, run: Callable[[Database], T]) -> T:
        return await asyncio.wrap_future(self._journal.write(run, uses_reserve=True))


def _owners(models: Iterable[StoredModel]) -> dict[str, str]:
    """Return the owner of each model, by model ID. If the tenant is unknown, the model itself is the owner."""
    return {model.model_id: model.tenant for model in models if model.tenant}


# ---- in the journal's thread


def spent_of_models(db: Database, models: Sequence[StoredModel], horizons: Horizons, keep: int) -> dict[str, list[int]]:
    """Return the spent operations of each model. Models without spent operations are left out."""
    spent = ((model.model_id, spent_numbers(db, model, horizons, keep)) for model in models)
    return {model_id: numbers for model_id, numbers in spent if numbers}


def spent_numbers(db: Database, model: StoredModel, horizons: Horizons, keep: int) -> list[int]:
    """Return the model's lowest spent numbers before the first unspent number, at most enough for one step."""
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
    """Yield the finished operations by number, up to the first operation without a result."""
    rows = db.execute(
        "SELECT seq_id, finished_at, result_bytes FROM operations WHERE model_id = ? AND seq_id <= ?"
        " ORDER BY seq_id LIMIT ?",
        (model.model_id, model.spent_up_to, ROWS_IN_A_STEP),
    )
    finished = takewhile(lambda row: row[1] is not None, rows)
    return (Finished(int(seq_id), float(at), int(result_bytes or 0)) for seq_id, at, result_bytes in finished)


def _for_one_step(sized: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yield the numbers that one step deletes, at least one number.

    Deleting a row with a large result takes long, because the result fills many pages.
    """
    room = BYTES_IN_A_STEP
    for number, result_bytes in sized:
        yield number
        room -= result_bytes
        if room < 0:
            return


def forget_rows(db: Database, model_id: str, numbers: Sequence[int]) -> None:
    """Delete the rows of these operations, but keep the numbers."""
    forgotten = journal_tables.read_forgotten(db, model_id)
    for seq_id in numbers:
        forgotten.add(seq_id)
    db.execute("DELETE FROM forgotten WHERE model_id = ?", (model_id,))
    db.executemany("INSERT INTO forgotten VALUES (?, ?, ?)", [(model_id, *ends) for ends in forgotten])
    db.executemany("DELETE FROM operations WHERE model_id = ? AND seq_id = ?", [(model_id, one) for one in numbers])


def read_results(db: Database, after: int) -> list[KeptResult]:
    """Return the results after this row, at most `SIZES_IN_A_STEP`.

    The query reads only the index, because reading the size from a row would also read the result.
    """
    rows = db.execute(
        "SELECT id, model_id, finished_at, result_bytes FROM operations INDEXED BY results"
        " WHERE result IS NOT NULL AND id > ? ORDER BY id LIMIT ?",
        (after, SIZES_IN_A_STEP),
    )
    return [KeptResult(int(row), str(model), float(at), int(size)) for row, model, at, size in rows]


def drop_results(db: Database, rows: Sequence[int]) -> None:
    db.executemany("UPDATE operations SET result = NULL WHERE id = ?", [(row,) for row in rows])


def forget_released_models(db: Database) -> list[str]:
    """Delete all data of released models that have no result left, and return the models."""
    rows = db.execute(
        "SELECT model_id FROM models WHERE state = 'released'"
        " AND NOT EXISTS (SELECT 1 FROM operations WHERE operations.model_id = models.model_id)"
    )
    forgotten = [str(model_id) for (model_id,) in rows.fetchall()]
    for table in ("forgotten", "plain_calls", "saved_names", "gradients", "interruptions", "models"):
        db.executemany(f"DELETE FROM {table} WHERE model_id = ?", [(model_id,) for model_id in forgotten])
    return forgotten


@dataclass(frozen=True, slots=True)
class Retention:
    """The limits of stored results.

    Results can be read for `seconds` after they finished, if the results of all models fit into `result_bytes`. If the
    results do not fit, the oldest results of the tenant with the most bytes are deleted first. Results that finished
    less than `least_seconds` ago are deleted only if the disk `is_short`.

    A model is closed if it was released, or could not be created. The newest `closed_models` of each tenant keep
    results for `seconds`, too. Older closed models lose results that finished more than `least_seconds` ago.

    Of the operations that a model's snapshot covers, two groups of rows are kept: the newest `operations`, and
    operations that finished less than `least_seconds` ago. Of all other operations that the snapshot covers, only the
    numbers are kept.
    """

    seconds: float
    result_bytes: int
    operations: int
    least_seconds: float
    closed_models: int
    is_short: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """An operation with a result, which never runs again."""

    seq_id: int
    finished_at: float
    result_bytes: int


@dataclass(frozen=True, slots=True)
class Horizons:
    """Times in Unix seconds that limit the age of results.

    A result from before `expired` is expired. A result from before `crowded_out` may be deleted to free space.
    """

    expired: float
    crowded_out: float

    def is_spent(self, operation: Finished, newest_beyond: int) -> bool:
        """Return whether the operation's row may be deleted.

        Operations above `newest_beyond` are the newest operations, which are kept.
        """
        if operation.seq_id <= newest_beyond and operation.finished_at <= self.crowded_out:
            return True
        return operation.finished_at <= self.expired


@dataclass(frozen=True, slots=True)
class KeptResult:
    """A stored result.

    The fields are the row, the model, the time at which the result finished (Unix seconds), and the size in bytes.
    """

    row: int
    model_id: str
    finished_at: float
    size_bytes: int


def surplus_models(models: Sequence[StoredModel], most: int) -> set[str]:
    """Return the oldest released models of each owner, without the newest `most`.

    `models` are in the order of creation.
    """
    released = Counter[str]()
    surplus = set()
    for model in reversed(models):
        if model.phase == "released":
            owner = model.tenant or ""
            released[owner] += 1
            if released[owner] > most:
                surplus.add(model.model_id)
    return surplus


def excess_bytes(bytes_of_owners: Mapping[str, int], budget_bytes: int) -> dict[str, int]:
    """Return, for each owner, the bytes above the largest level per owner at which the results of all owners fit.

    Owners with fewer bytes than the level are left out.
    """
    level = _level(sorted(bytes_of_owners.values()), budget_bytes)
    return {owner: size - level for owner, size in bytes_of_owners.items() if size > level}


def _level(sizes: list[int], budget_bytes: int) -> int:
    """Return the number of bytes that every owner may have. `sizes` are in ascending order."""
    left = budget_bytes
    for index, size in enumerate(sizes):
        share = left // (len(sizes) - index)
        if size > share:
            return max(share, 0)
        left -= size
    return sizes[-1] if sizes else 0


def crowded_out(
    oldest_first: Iterable[KeptResult],
    excess: dict[str, int],
    owners: Mapping[str, str],
    not_after: float,
) -> Iterator[KeptResult]:
    """Yield the oldest results of each owner until the owner's excess is gone.

    The yielded bytes are subtracted from `excess`.

    `owners` maps models to owners. Results that finished after `not_after` are kept.
    """
    for result in oldest_first:
        owner = owners.get(result.model_id, result.model_id)
        if excess.get(owner, 0) > 0 and result.finished_at <= not_after:
            excess[owner] -= result.size_bytes
            yield result
