"""Queries about usage and the audit log."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, delete, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.base import (
    Queries,
    fetch_all,
    insert_into,
    insert_unless_there,
    select_records,
    values,
)
from tinsmith_server.store.records import AuditEntry, AuditKind, ExtraRows, Session, StoredCheckpoints, Usage
from tinsmith_server.store.tables import audit, checkpoints, models, rounds, sessions, usage

# A statement can have some thousand values.
ROWS_AT_ONCE = 500
HOUR = timedelta(hours=1)

_STORAGE = "storage"


class UsageQueries(Queries):
    """The queries about usage."""

    async def add_usage(self, rows: Collection[Usage]) -> None:
        """Add to the stored amounts. Other replicas may add to the same amounts. No two of `rows` have the same key."""

        async def add(connection: AsyncConnection) -> None:
            await _add_usage(connection, rows)

        await self._database.write(add)

    async def add_storage_usage(self, now: datetime, least: timedelta, longest: timedelta) -> None:
        """Add the usage of storage by named checkpoints since the last round.

        A round adds nothing if less than `least` has passed since the last round. A time of more than `longest` since
        the last round counts as `longest`.
        """

        async def add(connection: AsyncConnection) -> None:
            last_at = await _last_round(connection, now)
            if last_at is None or now - last_at < least:
                return
            await connection.execute(update(rounds).where(rounds.c.name == _STORAGE).values(last_at=now))
            held = await connection.execute(_held_bytes(now))
            seconds = list(_by_hour(max(last_at, now - longest), now))
            rows = [
                Usage(tenant, "", base_model, hour, "storage", int(size) * count)
                for tenant, base_model, size in held
                for hour, count in seconds
                if count
            ]
            await _add_usage(connection, rows)

        await self._database.write(add)

    async def usage_between(self, tenant: str, start: datetime, end: datetime, most: int) -> Sequence[Usage]:
        """Return the usage by hour from `start` until before `end`, with the largest amounts first."""
        in_window = (usage.c.tenant == tenant) & (usage.c.hour >= start) & (usage.c.hour < end)
        order = (usage.c.hour, usage.c.amount.desc(), usage.c.session_id, usage.c.base_model, usage.c.kind)
        return await self._read_all(Usage, select_records(usage, Usage).where(in_window).order_by(*order).limit(most))

    async def sessions_by_id(self, tenant: str, session_ids: Collection[str]) -> Sequence[Session]:
        """Return the tenant's sessions with these IDs, at most some hundred IDs."""
        named = (sessions.c.tenant == tenant) & sessions.c.session_id.in_(session_ids)
        return await self._read_all(Session, select_records(sessions, Session).where(named))

    async def stored_checkpoints(
        self, tenant: str, now: datetime, project_id: str | None = None
    ) -> Sequence[StoredCheckpoints]:
        """Return the stored checkpoints by project, largest first.

        With `project_id`, return only the checkpoints of this project.
        """
        project = sessions.c.project_id
        size = func.coalesce(func.sum(checkpoints.c.size_bytes), 0)
        query = (
            select(project, func.count().label("count"), size.label("size_bytes"))
            .select_from(checkpoints)
            .outerjoin(models, models.c.model_id == checkpoints.c.run_id)
            .outerjoin(sessions, sessions.c.session_id == models.c.session_id)
            .where(checkpoints.c.tenant == tenant, _is_stored(now))
            .group_by(project)
            .order_by(size.desc())
        )
        if project_id is not None:
            query = query.where(project == project_id)

        async def read(connection: AsyncConnection) -> Sequence[StoredCheckpoints]:
            rows = await connection.execute(query)
            return [StoredCheckpoints(project_id, int(count), int(size)) for project_id, count, size in rows]

        return await self._database.read(read)


class AuditQueries(Queries):
    """The queries about the audit log."""

    async def list_audit(
        self,
        tenant: str,
        start: datetime,
        end: datetime,
        after: AuditEntry | None,
        limit: int,
        kind: AuditKind = "all",
    ) -> Sequence[AuditEntry]:
        """Return the entries from `start` until before `end` with a number above `after`, oldest first."""
        in_window = (audit.c.tenant == tenant) & (audit.c.at >= start) & (audit.c.at < end)
        if kind != "all":
            is_of_checkpoint = audit.c.event.startswith("checkpoint_", autoescape=True)
            in_window &= is_of_checkpoint if kind == "checkpoints" else ~is_of_checkpoint
        query = select_records(audit, AuditEntry).where(in_window).order_by(audit.c.at, audit.c.entry_id).limit(limit)
        if after is not None:
            query = query.where(tuple_(audit.c.at, audit.c.entry_id) > (after.at, after.entry_id))
        return await self._database.read(lambda connection: fetch_all(connection, AuditEntry, query))

    async def delete_old_accounts(self, before: datetime) -> None:
        """Delete the usage and the audit entries from before this time."""
        await self._write(delete(usage).where(usage.c.hour < before))
        await self._write(delete(audit).where(audit.c.at < before))


async def write_extra_rows(connection: AsyncConnection, extra_rows: ExtraRows) -> None:
    """Write usage and audit entries in the same transaction as the change that they describe."""
    await _add_usage(connection, [one for one in extra_rows if isinstance(one, Usage)])
    entries = [values(one) for one in extra_rows if isinstance(one, AuditEntry)]
    for entry in entries:
        # The database assigns the number.
        del entry["entry_id"]
        await connection.execute(audit.insert().values(entry))


async def _add_usage(connection: AsyncConnection, rows: Collection[Usage]) -> None:
    """Add the amounts.

    All replicas use the same order, because otherwise two replicas that add to the same rows could deadlock.
    """
    ordered = sorted(rows, key=lambda one: (one.tenant, one.hour, one.session_id, one.base_model, one.kind))
    for first in range(0, len(ordered), ROWS_AT_ONCE):
        insert = insert_into(connection, usage, [values(one) for one in ordered[first : first + ROWS_AT_ONCE]])
        added = {"amount": usage.c.amount + insert.excluded.amount}
        await connection.execute(insert.on_conflict_do_update(index_elements=list(usage.primary_key), set_=added))


async def _last_round(connection: AsyncConnection, now: datetime) -> datetime | None:
    """Return the time of the last storage round of any replica, and lock its row.

    Return None before the first round.
    """
    first = {"name": _STORAGE, "since": now, "last_at": now}
    if await insert_unless_there(connection, rounds, first):
        return None
    last = select(rounds.c.last_at).where(rounds.c.name == _STORAGE).with_for_update()
    last_at: datetime = (await connection.execute(last)).scalar_one()
    return last_at


def _held_bytes(now: datetime) -> Select[Any]:
    held = select(checkpoints.c.tenant, checkpoints.c.base_model, func.sum(checkpoints.c.size_bytes))
    return held.where(_is_stored(now)).group_by(checkpoints.c.tenant, checkpoints.c.base_model)


def _is_stored(now: datetime) -> ColumnElement[bool]:
    """Return the SQL condition for named checkpoints that have not expired."""
    unexpired = checkpoints.c.expires_at.is_(None) | (checkpoints.c.expires_at > now)
    return checkpoints.c.deleted_at.is_(None) & (checkpoints.c.type != "ephemeral") & unexpired


def _by_hour(start: datetime, end: datetime) -> Iterator[tuple[datetime, int]]:
    """Yield the hours that overlap the period, each with the seconds of the overlap."""
    hour = start.replace(minute=0, second=0, microsecond=0)
    while hour < end:
        seconds = (min(end, hour + HOUR) - max(start, hour)).total_seconds()
        yield hour, round(seconds)
        hour += HOUR
