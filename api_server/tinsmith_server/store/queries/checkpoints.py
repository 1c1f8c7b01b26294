"""Queries about checkpoints. A checkpoint is a name for an immutable directory.

A name changes only to a newer directory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, Subquery, delete, exists, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.accounting import write_extra_rows
from tinsmith_server.store.queries.base import (
    Queries,
    changes_rows,
    insert_unless_there,
    newest_first,
    select_records,
    to_record,
    values,
)
from tinsmith_server.store.queries.promotions import is_promoted
from tinsmith_server.store.records import (
    LIVE,
    Checkpoint,
    CheckpointFilter,
    CheckpointPosition,
    CheckpointTotals,
    CheckpointType,
    ExtraRows,
    Page,
    PromotedPath,
)
from tinsmith_server.store.tables import (
    TOMBSTONE,
    UNNAMED,
    checkpoints,
    garbage,
    models,
    sampling_sessions,
    sessions,
    workers,
)

# A batch must not block SQLite's write lock for long.
TOMBSTONES_AT_ONCE = 1000

_NOT_DELETED = checkpoints.c.deleted_at.is_(None)
_EPHEMERAL = checkpoints.c.type == "ephemeral"
_NAME = (checkpoints.c.run_id, checkpoints.c.type, checkpoints.c.name)
_AGE = (checkpoints.c.created_at, checkpoints.c.epoch, checkpoints.c.event_id, checkpoints.c.run_id)


class CheckpointQueries(Queries):
    """The queries about checkpoints."""

    async def put_checkpoint(self, checkpoint: Checkpoint, extra_rows: ExtraRows = ()) -> Checkpoint | None:
        """Point the name at a new directory, unless the stored record has the same or a newer (epoch, event_id).

        A deleted record counts, too. Returns the replaced record; the files of this record become garbage. Returns None
        if no record was replaced, or if both records have the same directory. The new directory is no longer garbage.
        """
        return await self._database.write(lambda connection: _put(connection, checkpoint, extra_rows))

    async def get_checkpoint(self, run_id: str, type: CheckpointType, name: str) -> Checkpoint | None:
        return await self._look_up(Checkpoint, _select().where(_named(run_id, type, name)))

    async def checkpoints_of_run(self, run_id: str) -> Sequence[Checkpoint]:
        """Return the named checkpoints of the run, newest first."""
        query = _select().where(checkpoints.c.run_id == run_id, ~_EPHEMERAL)
        return await self._read_all(Checkpoint, query.order_by(*newest_first(*_AGE)))

    async def newest_checkpoints(self, run_ids: Collection[str], now: datetime) -> Sequence[Checkpoint]:
        """Return each run's newest named checkpoint of each type, without those that have expired."""
        valid = checkpoints.c.expires_at.is_(None) | (checkpoints.c.expires_at > now)
        named = checkpoints.c.run_id.in_(run_ids) & _NOT_DELETED & ~_EPHEMERAL & valid
        ranked = _ranked_by_age(named)
        return await self._read_all(Checkpoint, select(ranked).where(ranked.c.age == 1))

    async def list_checkpoints(
        self, tenant: str, limit: int, offset: int, types: Collection[CheckpointType] | None = None
    ) -> Page[Checkpoint]:
        """Return a page of named checkpoints, newest first. With `types`, return only these types."""
        query = _select().where(checkpoints.c.tenant == tenant, ~_EPHEMERAL).order_by(*newest_first(*_AGE))
        if types is not None:
            query = query.where(checkpoints.c.type.in_(sorted(types)))
        return await self._read_page(Checkpoint, query, limit, offset)

    async def checkpoints_after(
        self, wanted: CheckpointFilter, behind: CheckpointPosition | None, limit: int
    ) -> Sequence[Checkpoint]:
        """Return named checkpoints, newest first, after the position. Without a position, begin with the newest."""
        query = _select().where(
            checkpoints.c.tenant == wanted.tenant, ~_EPHEMERAL, checkpoints.c.type.in_(sorted(wanted.types))
        )
        if wanted.base_models is not None:
            query = query.where(checkpoints.c.base_model.in_(wanted.base_models))
        if wanted.project_ids is not None:
            of_projects = (
                select(models.c.model_id)
                .join_from(models, sessions, models.c.session_id == sessions.c.session_id)
                .where(sessions.c.project_id.in_(wanted.project_ids), sessions.c.tenant == wanted.tenant)
            )
            query = query.where(checkpoints.c.run_id.in_(of_projects))
        position = (checkpoints.c.created_at, *_NAME)
        if behind is not None:
            query = query.where(tuple_(*position) < tuple_(*astuple(behind)))
        return await self._read_all(Checkpoint, query.order_by(*newest_first(*position)).limit(limit))

    async def checkpoint_totals_of_sessions(self, session_ids: Collection[str]) -> Mapping[str, CheckpointTotals]:
        """Return the totals of the named checkpoints, by session. Sessions without checkpoints are left out."""
        query = (
            select(models.c.session_id, func.count(), func.sum(checkpoints.c.size_bytes))
            .join_from(checkpoints, models, checkpoints.c.run_id == models.c.model_id)
            .where(models.c.session_id.in_(session_ids), _NOT_DELETED, ~_EPHEMERAL)
            .group_by(models.c.session_id)
        )

        async def read(connection: AsyncConnection) -> Mapping[str, CheckpointTotals]:
            return {row[0]: CheckpointTotals(row[1], int(row[2])) for row in await connection.execute(query)}

        return await self._database.read(read)

    async def checkpoint_bytes(self, tenant: str) -> int:
        """Return the total size of all named checkpoints of the tenant, in bytes."""
        held = (checkpoints.c.tenant == tenant) & _NOT_DELETED & ~_EPHEMERAL
        return await self._count(select(func.coalesce(func.sum(checkpoints.c.size_bytes), 0)).where(held))

    async def delete_checkpoint(
        self,
        run_id: str,
        type: CheckpointType,
        name: str,
        now: datetime,
        extra_rows: ExtraRows = (),
        unless_promoted: PromotedPath | None = None,
        *,
        unless_public: bool = False,
    ) -> Checkpoint | None:
        """Delete the record, and leave a tombstone, so that a replayed event does not restore the record.

        Returns the deleted record, or None if no record exists or a promoted name points to the checkpoint.
        """
        which = _named(run_id, type, name)
        if unless_public:
            which &= ~checkpoints.c.public
        return await self._entomb(which, now, extra_rows, unless_promoted)

    async def surplus_checkpoints(self, tenant: str, kept: int, limit: int) -> Sequence[Checkpoint]:
        """Return named checkpoints beyond the newest `kept` of their run and type, oldest first.

        Public checkpoints are counted, but not returned.
        """
        named = (checkpoints.c.tenant == tenant) & _NOT_DELETED & ~_EPHEMERAL
        ranked = _ranked_by_age(named)
        surplus = select(ranked).where(ranked.c.age > kept, ~ranked.c.public)
        oldest_first = surplus.order_by(ranked.c.created_at, ranked.c.run_id, ranked.c.type, ranked.c.name)
        return await self._read_all(Checkpoint, oldest_first.limit(limit))

    async def delete_expired_checkpoint(
        self, run_id: str, type: CheckpointType, name: str, now: datetime
    ) -> Checkpoint | None:
        """Delete the record if it has expired at `now`.

        The record may have changed since the caller read it, so the expiry is checked again.
        """
        return await self._entomb(_named(run_id, type, name) & (checkpoints.c.expires_at <= now), now)

    async def _entomb(
        self,
        which: ColumnElement[bool],
        now: datetime,
        extra_rows: ExtraRows = (),
        unless_promoted: PromotedPath | None = None,
    ) -> Checkpoint | None:
        entomb = update(checkpoints).where(which, _NOT_DELETED).values(deleted_at=now).returning(*checkpoints.c)

        async def bury(connection: AsyncConnection) -> Checkpoint | None:
            if unless_promoted is not None and await is_promoted(connection, unless_promoted):
                return None
            row = (await connection.execute(entomb)).one_or_none()
            if row is None:
                return None
            await _discard(connection, row.directory)
            await write_extra_rows(connection, extra_rows)
            return to_record(Checkpoint, row)

        return await self._database.write(bury)

    async def set_checkpoint_public(
        self, run_id: str, type: CheckpointType, name: str, public: bool, extra_rows: ExtraRows = ()
    ) -> None:
        await self._change(_named(run_id, type, name), {"public": public}, extra_rows)

    async def set_checkpoint_expiry(
        self,
        run_id: str,
        type: CheckpointType,
        name: str,
        expires_at: datetime | None,
        extra_rows: ExtraRows = (),
        unless_promoted: PromotedPath | None = None,
    ) -> bool:
        """Set the expiry of a checkpoint.

        Returns False if no record exists, or if a promoted name points to the checkpoint.
        """
        return await self._change(_named(run_id, type, name), {"expires_at": expires_at}, extra_rows, unless_promoted)

    async def _change(
        self,
        which: ColumnElement[bool],
        changes: Mapping[str, Any],
        extra_rows: ExtraRows,
        unless_promoted: PromotedPath | None = None,
    ) -> bool:
        statement = update(checkpoints).where(which, _NOT_DELETED).values(changes)

        async def change(connection: AsyncConnection) -> bool:
            if unless_promoted is not None and await is_promoted(connection, unless_promoted):
                return False
            if not await changes_rows(connection, statement):
                return False
            await write_extra_rows(connection, extra_rows)
            return True

        return await self._database.write(change)

    async def expired_checkpoints(self, now: datetime) -> Sequence[Checkpoint]:
        """Return the records of all types with an `expires_at` at or before `now`."""
        query = _select().where(checkpoints.c.expires_at <= now).order_by(checkpoints.c.expires_at)
        return await self._read_all(Checkpoint, query)

    async def ephemeral_checkpoints(self, tenant: str) -> Sequence[Checkpoint]:
        """Return the tenant's unnamed checkpoints, oldest first."""
        query = select_records(checkpoints, Checkpoint).where(checkpoints.c.tenant == tenant, UNNAMED)
        return await self._read_all(Checkpoint, query.order_by(*_AGE))

    async def ephemeral_of_finished_sessions(self, finished_before: datetime) -> Sequence[Checkpoint]:
        # Checkpoints are joined by their model. The sampling session's row is missing if the save's result was never
        # fetched.
        query = (
            _select()
            .join(models, models.c.model_id == checkpoints.c.run_id)
            .join(sessions, sessions.c.session_id == models.c.session_id)
            .where(_EPHEMERAL, sessions.c.finished_at < finished_before)
            .order_by(*_AGE)
        )
        return await self._read_all(Checkpoint, query)

    async def delete_old_tombstones(self, deleted_before: datetime) -> None:
        """Delete the tombstones of ended models after all events of the model's worker are applied.

        The sampling sessions of unnamed saves are deleted, too, because a run leaves one sampling session for each
        step.
        """
        is_applied = exists().where(
            models.c.model_id == checkpoints.c.run_id,
            models.c.state.not_in(LIVE),
            workers.c.worker_id == models.c.worker_id,
            workers.c.event_cursor >= checkpoints.c.event_id,
        )
        old = (
            select(*_NAME)
            .where(TOMBSTONE, checkpoints.c.deleted_at < deleted_before, is_applied)
            .limit(TOMBSTONES_AT_ONCE)
        )
        bury = delete(checkpoints).where(tuple_(*_NAME).in_(old)).returning(checkpoints.c.type, checkpoints.c.name)

        async def forget(connection: AsyncConnection) -> bool:
            buried = (await connection.execute(bury)).all()
            opened = [row.name for row in buried if row.type == "ephemeral"]
            by_saves = sampling_sessions.c.sampling_session_id.in_(opened)
            await connection.execute(delete(sampling_sessions).where(by_saves))
            return bool(buried)

        while await self._database.write(forget):
            pass


def _select() -> Select[Any]:
    return select_records(checkpoints, Checkpoint).where(_NOT_DELETED)


def _ranked_by_age(where: ColumnElement[bool]) -> Subquery:
    """Return the checkpoints with their `age` among those of the same run and type, from 1 for the newest."""
    order = (checkpoints.c.created_at.desc(), checkpoints.c.epoch.desc(), checkpoints.c.event_id.desc())
    age = func.row_number().over(partition_by=(checkpoints.c.run_id, checkpoints.c.type), order_by=order)
    return select(checkpoints, age.label("age")).where(where).subquery()


def _named(run_id: str, type: CheckpointType, name: str) -> ColumnElement[bool]:
    return (checkpoints.c.run_id == run_id) & (checkpoints.c.type == type) & (checkpoints.c.name == name)


async def _put(connection: AsyncConnection, checkpoint: Checkpoint, extra_rows: ExtraRows) -> Checkpoint | None:
    row = {**values(checkpoint), "deleted_at": None}
    if await insert_unless_there(connection, checkpoints, row):
        await _keep(connection, checkpoint.directory)
        await write_extra_rows(connection, extra_rows)
        return None
    named = _named(checkpoint.run_id, checkpoint.type, checkpoint.name)
    # The row is locked until the commit, even if it is deleted. On SQLite the whole transaction holds the write lock.
    present = (await connection.execute(select(checkpoints).where(named).with_for_update())).one()
    if (present.epoch, present.event_id) >= (checkpoint.epoch, checkpoint.event_id):
        return None
    await connection.execute(update(checkpoints).where(named).values(row))
    await _keep(connection, checkpoint.directory)
    await write_extra_rows(connection, extra_rows)
    # A deleted record's directory became garbage at its deletion; a directory in use is not garbage.
    if present.deleted_at is not None or present.directory == checkpoint.directory:
        return None
    await _discard(connection, present.directory)
    return to_record(Checkpoint, present)


async def _keep(connection: AsyncConnection, directory: str) -> None:
    """Remove the directory from the list of garbage, in the transaction that stores a record of the directory.

    The files of the directory are then kept.
    """
    await connection.execute(delete(garbage).where(garbage.c.directory == directory))


async def _discard(connection: AsyncConnection, directory: str) -> None:
    """Add the directory to the list of garbage, in the transaction that removes the record of the directory.

    So after a crash, all files without a record are in the list of garbage.
    """
    await insert_unless_there(connection, garbage, {"directory": directory})
