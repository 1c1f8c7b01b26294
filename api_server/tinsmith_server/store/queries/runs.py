"""Queries about the series of runs: steps that workers report, and values that clients report."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import orjson
from sqlalchemy import Double, Select, cast, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.base import (
    Queries,
    count,
    fetch_all,
    fetch_made,
    insert_into,
    insert_unless_there,
    select_records,
    values,
)
from tinsmith_server.store.records import LIVE, RunProgress, RunReport, RunStep
from tinsmith_server.store.run_series import FOLD, FULL_STEPS, SLACK, advance, fold, surplus
from tinsmith_server.store.tables import models, run_progress, run_reports, run_steps

MOST_REPORTS = 2 * FULL_STEPS
# SQLite takes 32,766 parameters in a statement, and other writes wait for a batch.
ROWS_AT_ONCE = 500
RUNS_AT_ONCE = 20


class RunQueries(Queries):
    """The queries about the series of runs."""

    async def add_steps(self, steps: Sequence[RunStep]) -> Collection[str]:
        """Add steps to the series of their runs. Return the runs that do not exist.

        The steps of a run are in order. A step that the series has already has no effect.
        """

        async def add(connection: AsyncConnection) -> Collection[str]:
            # All replicas use the same order, because two that lock the same rows could deadlock otherwise.
            by_run = {run_id: list(some) for run_id, some in groupby(sorted(steps, key=_run_id), _run_id)}
            known = select(models.c.model_id).where(models.c.model_id.in_(by_run))
            there = {str(run_id) for run_id in await connection.scalars(known)}
            for run_id in sorted(there):
                await _extend(connection, run_id, by_run[run_id])
            return by_run.keys() - there

        return await self._database.write(add)

    async def run_steps(self, run_id: str, after: int, limit: int) -> Sequence[RunStep]:
        """Return the points after this position, oldest first."""
        query = _steps_of(run_id).where(run_steps.c.position > after)
        return await self._read_all(RunStep, query.limit(limit))

    async def add_reports(
        self, run_id: str, reports: Sequence[RunReport], most_bytes: int, total_steps: int | None = None
    ) -> bool:
        """Add values to the steps of a run. Returns False if more than `most_bytes` would be written for the run.

        A value of the same step and name is replaced. The store assigns the revisions. `total_steps` is the length of
        the run, if the client has told it.
        """

        async def add(connection: AsyncConnection) -> bool:
            progress = await _locked(connection, run_id)
            merged, new = await _merged(connection, run_id, reports)
            # A step is written again with all of its values, so they count again.
            size_bytes = progress.report_bytes + sum(_size_bytes(one.values) for one in merged)
            if size_bytes > most_bytes:
                return False
            numbered = [replace(one, revision=progress.revision + number) for number, one in enumerate(merged, 1)]
            await _put_reports(connection, numbered)
            grown = replace(
                progress,
                revision=progress.revision + len(numbered),
                reports=progress.reports + new,
                report_bytes=size_bytes,
                total_steps=total_steps or progress.total_steps,
            )
            await _put(connection, grown)
            return True

        return await self._database.write(add)

    async def run_reports(self, run_id: str, after: int, limit: int) -> Sequence[RunReport]:
        """Return the reports after this revision, the earliest change first."""
        query = select_records(run_reports, RunReport).where(
            run_reports.c.run_id == run_id, run_reports.c.revision > after
        )
        return await self._read_all(RunReport, query.order_by(run_reports.c.revision).limit(limit))

    async def progress_of(self, run_ids: Collection[str]) -> Mapping[str, RunProgress]:
        """Return the progress of the runs that have a series."""
        query = select_records(run_progress, RunProgress).where(run_progress.c.run_id.in_(run_ids))
        return {one.run_id: one for one in await self._read_all(RunProgress, query)}

    async def runs_digest(self, tenant: str) -> Sequence[object]:
        """Return a value that differs if a list of the tenant's runs may look different.

        A run that has ended is only counted, because a tenant may have a hundred thousand of them.
        """
        all_runs = select(func.count()).select_from(models).where(models.c.tenant == tenant)
        sums = [func.sum(cast(run_progress.c[name], Double)) for name in ("step", "revision", "total_steps")]
        live = (
            select(models.c.state, func.count(), func.max(models.c.last_request_at), func.max(run_progress.c.at), *sums)
            .select_from(models.outerjoin(run_progress, run_progress.c.run_id == models.c.model_id))
            .where(models.c.tenant == tenant, models.c.state.in_(LIVE))
            .group_by(models.c.state)
            .order_by(models.c.state)
        )

        async def read(connection: AsyncConnection) -> Sequence[object]:
            return [await connection.scalar(all_runs), *(tuple(row) for row in await connection.execute(live))]

        return await self._database.read(read)

    async def fold_series(self) -> None:
        """Make the series of a few runs shorter: old steps become means, and old reports are thinned."""
        long = (run_progress.c.unfolded > FULL_STEPS + SLACK) | (run_progress.c.reports > FULL_STEPS + SLACK)
        for run_id in await self._read_ids(select(run_progress.c.run_id).where(long).limit(RUNS_AT_ONCE)):
            await self._database.write(partial(_shorten, run_id=run_id))


def _run_id(step: RunStep) -> str:
    return step.run_id


def _steps_of(run_id: str) -> Select[tuple[object, ...]]:
    return select_records(run_steps, RunStep).where(run_steps.c.run_id == run_id).order_by(run_steps.c.position)


async def _locked(connection: AsyncConnection, run_id: str) -> RunProgress:
    """Return the run's progress, and lock its row until the transaction ends."""
    await insert_unless_there(connection, run_progress, values(RunProgress(run_id)))
    query = select_records(run_progress, RunProgress).where(run_progress.c.run_id == run_id).with_for_update()
    return await fetch_made(connection, RunProgress, query)


async def _put(connection: AsyncConnection, progress: RunProgress) -> None:
    await connection.execute(
        update(run_progress).where(run_progress.c.run_id == progress.run_id).values(values(progress))
    )


async def _extend(connection: AsyncConnection, run_id: str, steps: Sequence[RunStep]) -> None:
    progress = await _locked(connection, run_id)
    new = [step for step in steps if step.position > progress.position]
    if not new:
        return
    for step in new:
        progress = advance(progress, step)
    await _insert(connection, new)
    await _put(connection, progress)


async def _insert(connection: AsyncConnection, points: Sequence[RunStep]) -> None:
    for first in range(0, len(points), ROWS_AT_ONCE):
        rows = [values(point) for point in points[first : first + ROWS_AT_ONCE]]
        await connection.execute(insert_into(connection, run_steps, rows))


async def _merged(
    connection: AsyncConnection, run_id: str, reports: Sequence[RunReport]
) -> tuple[list[RunReport], int]:
    """Return one report for each step, with the values that the step has already, and the number of new steps."""
    of_steps = (run_reports.c.run_id == run_id) & run_reports.c.step.in_({one.step for one in reports})
    found = await fetch_all(connection, RunReport, select_records(run_reports, RunReport).where(of_steps))
    merged = {one.step: one for one in found}
    for one in reports:
        earlier = merged.get(one.step)
        merged[one.step] = one if earlier is None else replace(one, values={**earlier.values, **one.values})
    return sorted(merged.values(), key=lambda one: one.step), len(merged) - len(found)


async def _put_reports(connection: AsyncConnection, reports: Sequence[RunReport]) -> None:
    for first in range(0, len(reports), ROWS_AT_ONCE):
        rows = [values(one) for one in reports[first : first + ROWS_AT_ONCE]]
        insert = insert_into(connection, run_reports, rows)
        changed = {name: insert.excluded[name] for name in ("revision", "at", "values")}
        upsert = insert.on_conflict_do_update(index_elements=list(run_reports.primary_key), set_=changed)
        await connection.execute(upsert)


def _size_bytes(reported: Mapping[str, float]) -> int:
    return len(orjson.dumps(dict(reported)))


async def _shorten(connection: AsyncConnection, run_id: str) -> None:
    progress = await _locked(connection, run_id)
    steps, unfolded = 1, progress.unfolded
    while folded := await _fold(connection, run_id, steps):
        unfolded -= folded if steps == 1 else 0
        steps *= FOLD
    if progress.reports > FULL_STEPS + SLACK:
        progress = await _thin_reports(connection, progress)
    await _put(connection, replace(progress, unfolded=unfolded))


async def _fold(connection: AsyncConnection, run_id: str, steps: int) -> int:
    """Fold the oldest points with this number of steps. Return how many points were folded."""
    of_kind = (run_steps.c.run_id == run_id) & (run_steps.c.steps == steps)
    points = int(await connection.scalar(select(func.count()).select_from(run_steps).where(of_kind)) or 0)
    number = surplus(points, steps)
    if number:
        oldest = _steps_of(run_id).where(run_steps.c.steps == steps).limit(number)
        found = await fetch_all(connection, RunStep, oldest)
        await connection.execute(delete(run_steps).where(of_kind, run_steps.c.position <= found[-1].position))
        await _insert(connection, fold(found))
    return number


async def _thin_reports(connection: AsyncConnection, progress: RunProgress) -> RunProgress:
    """Keep the newest reports, and of the older ones those of every tenth step. Return the new progress."""
    of_run = run_reports.c.run_id == progress.run_id
    number = select(func.count()).select_from(run_reports).where(of_run)
    newest = select(run_reports.c.step).where(of_run).order_by(run_reports.c.step.desc())
    before = await count(connection, number)
    full_from = await connection.scalar(newest.offset(FULL_STEPS - 1).limit(1))
    if full_from is not None:
        between = of_run & (run_reports.c.step < full_from) & (run_reports.c.step % FOLD != 0)
        await connection.execute(delete(run_reports).where(between))
    kept_from = await connection.scalar(newest.offset(MOST_REPORTS - 1).limit(1))
    if kept_from is not None:
        await connection.execute(delete(run_reports).where(of_run, run_reports.c.step < kept_from))
    left_bytes = progress.report_bytes * await count(connection, number) // max(before, 1)
    return replace(progress, reports=FULL_STEPS, report_bytes=left_bytes)
