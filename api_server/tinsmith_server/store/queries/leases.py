"""Queries about replicas and their leases.

Times are read from the database's clock, because the clocks of the replicas may differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, case, delete, func, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.columns import UtcTime
from tinsmith_server.store.queries.base import Queries, insert_into
from tinsmith_server.store.tables import leases, replicas, rounds

# The row of a replica that ended long ago has no use.
_FORGET_SECONDS = 3600.0


class LeaseQueries(Queries):
    """The queries that divide the background tasks among the replicas."""

    async def now(self) -> datetime:
        """Return the time of the database's clock."""

        async def now(connection: AsyncConnection) -> datetime:
            time: datetime = (await connection.execute(select(from_now(connection, 0)))).scalar_one()
            return time

        return await self._database.read(now)

    async def announce_replica(self, replica: str, seconds: float) -> Sequence[str]:
        """Announce the replica for this number of seconds. Return all announced replicas, in order."""

        async def announce_replica(connection: AsyncConnection) -> Sequence[str]:
            until = from_now(connection, seconds)
            insert = insert_into(connection, replicas, {"replica": replica, "expires_at": until})
            await connection.execute(
                insert.on_conflict_do_update(index_elements=["replica"], set_={"expires_at": until})
            )
            return await _attending(connection)

        return await self._database.write(announce_replica)

    async def announced_replicas(self) -> Sequence[str]:
        """Return all announced replicas, in order."""
        return await self._database.read(_attending)

    async def hold_leases(self, replica: str, names: Collection[str], seconds: float) -> frozenset[str]:
        """Take, for `seconds`, the given leases that are free, have expired, or belong to the replica.

        Return the leases that the replica now holds.
        """
        if not names:
            return frozenset()

        async def hold(connection: AsyncConnection) -> frozenset[str]:
            now, until = from_now(connection, 0), from_now(connection, seconds)
            # All replicas lock rows in one order, because two replicas with different orders could deadlock.
            rows = [{"name": name, "owner": replica, "expires_at": until} for name in sorted(names)]
            insert = insert_into(connection, leases, rows)
            free = (leases.c.owner == replica) | (leases.c.expires_at <= now)
            renewed = {"owner": replica, "expires_at": until}
            taken = insert.on_conflict_do_update(index_elements=["name"], set_=renewed, where=free)
            return frozenset((await connection.scalars(taken.returning(leases.c.name))).all())

        return await self._database.write(hold)

    async def give_up_leases(self, replica: str, names: Collection[str]) -> None:
        """Free the given leases, if the replica holds them."""

        async def give_up(connection: AsyncConnection) -> None:
            own = (leases.c.owner == replica) & leases.c.name.in_(names)
            locked = select(leases.c.name).where(own).order_by(leases.c.name).with_for_update()
            await connection.execute(delete(leases).where(leases.c.name.in_(locked)))

        await self._database.write(give_up)

    async def leave(self, replica: str) -> None:
        """Free all leases of the replica, and end its announcement."""
        await self._write(delete(leases).where(leases.c.owner == replica))
        await self._write(delete(replicas).where(replicas.c.replica == replica))

    async def delete_expired_replicas(self) -> None:
        """Delete the rows of replicas and leases that expired more than an hour ago."""

        async def forget(connection: AsyncConnection) -> None:
            long_ago = from_now(connection, -_FORGET_SECONDS)
            await connection.execute(delete(leases).where(leases.c.expires_at <= long_ago))
            await connection.execute(delete(replicas).where(replicas.c.expires_at <= long_ago))

        await self._database.write(forget)

    async def record_round(self, name: str, now: datetime, absence: timedelta) -> datetime:
        """Record that a round with this name ran at `now`.

        Returns the time since which the rounds with this name, at all replicas together, have had no gap longer than
        `absence`.
        """
        gap = rounds.c.last_at < now - absence

        async def note(connection: AsyncConnection) -> datetime:
            insert = insert_into(connection, rounds, {"name": name, "since": now, "last_at": now})
            noted = insert.on_conflict_do_update(
                index_elements=["name"],
                set_={
                    "since": case((gap, now), else_=rounds.c.since),
                    "last_at": case((rounds.c.last_at < now, now), else_=rounds.c.last_at),
                },
            )
            since: datetime = (await connection.execute(noted.returning(rounds.c.since))).scalar_one()
            return since

        return await self._database.write(note)


async def _attending(connection: AsyncConnection) -> Sequence[str]:
    there = replicas.c.expires_at > from_now(connection, 0)
    return (await connection.scalars(select(replicas.c.replica).where(there).order_by(replicas.c.replica))).all()


def from_now(connection: AsyncConnection, seconds: float) -> ColumnElement[datetime]:
    """Return the time after this number of seconds.

    A SQLite file is local, so the clock of this machine is the database's clock.
    """
    if connection.dialect.name == "sqlite":
        return literal(datetime.now(UTC) + timedelta(seconds=seconds), UtcTime())
    return func.clock_timestamp(type_=UtcTime()) + func.make_interval(0, 0, 0, 0, 0, 0, seconds)
