"""Places: which slot of which worker a model holds from before its creation until its end, and the line for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Select, Update, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.base import Choice
from tinsmith_server.store.queries.base import (
    Queries,
    changes_rows,
    fetch_all,
    fetch_one,
    insert_unless_there,
    select_records,
)
from tinsmith_server.store.queries.workers import unseen_worker
from tinsmith_server.store.records import Holder, Line, Model, Waiting
from tinsmith_server.store.tables import models, placements, sessions, workers


class PlacementQueries(Queries):
    """The part of `Store` about places at workers."""

    async def line(self, base_models: Collection[str], worker_ids: Collection[str]) -> Line:
        return await self._database.read(lambda connection: _line(connection, base_models, worker_ids))

    async def give_places(
        self, base_models: Collection[str], slots: Mapping[str, int], choose: Choice
    ) -> Mapping[str, str]:
        async def give(connection: AsyncConnection) -> Mapping[str, str]:
            await _lock_workers(connection, slots)
            gifts = choose(await _line(connection, base_models, slots))
            taken = await _taken_slots(connection, slots)
            return {
                model_id: worker_id
                for model_id in await _free_for_us(connection, gifts)
                if await _give(connection, model_id, worker_id := gifts[model_id], taken[worker_id], slots[worker_id])
            }

        return await self._database.write(give)

    async def bind_where_made(self, model_id: str, worker_id: str, slots: int) -> bool:
        known = await self._look_up(Model, _selected(model_id))
        if known is not None and (known.worker_id, known.state) == (worker_id, "bound"):
            return True

        async def bind(connection: AsyncConnection) -> bool:
            model = await _locked_model(connection, model_id)
            if model is None or model.state != "accepted":
                return model is not None and (model.worker_id, model.state) == (worker_id, "bound")
            if model.worker_id != worker_id:
                await connection.execute(delete(placements).where(placements.c.model_id == model_id))
                await _lock_workers(connection, [worker_id])
                await _take_slot(connection, model_id, worker_id, slots)
            await connection.execute(_of(model_id).values(worker_id=worker_id, state="bound"))
            return True

        return await self._database.write(bind)

    async def displace_model(self, model_id: str, worker_id: str) -> None:
        async def displace(connection: AsyncConnection) -> None:
            model = await _locked_model(connection, model_id)
            if model is not None and (model.worker_id, model.state) == (worker_id, "accepted"):
                await connection.execute(_of(model_id).values(worker_id=""))
                await connection.execute(delete(placements).where(placements.c.model_id == model_id))

        await self._database.write(displace)

    async def used_slots(self) -> Mapping[str, int]:
        async def count(connection: AsyncConnection) -> Mapping[str, int]:
            rows = select(placements.c.worker_id, func.count()).group_by(placements.c.worker_id)
            return dict((await connection.execute(rows)).all())

        return await self._database.read(count)


async def _line(connection: AsyncConnection, base_models: Collection[str], worker_ids: Collection[str]) -> Line:
    accepted = (models.c.state == "accepted") & (models.c.worker_id == "") & models.c.base_model.in_(base_models)
    waiting = select_records(models, Waiting).where(accepted).order_by(models.c.created_at, models.c.model_id)
    holders = (
        select(*(models.c[name] for name in ("model_id", "session_id", "tenant", "last_request_at")))
        .add_columns(placements.c.worker_id)
        .join(placements, placements.c.model_id == models.c.model_id)
        .where(placements.c.worker_id.in_(worker_ids))
    )
    at_work = select(sessions.c.tenant).where(sessions.c.finished_at.is_(None)).distinct()
    return Line(
        waiting=tuple(await fetch_all(connection, Waiting, waiting)),
        holders=tuple(await fetch_all(connection, Holder, holders)),
        tenants_at_work=frozenset((await connection.scalars(at_work)).all()),
    )


async def _lock_workers(connection: AsyncConnection, worker_ids: Collection[str]) -> None:
    """In one order for all: two that read the same free slot at once would both want it."""
    for worker_id in sorted(worker_ids):
        await insert_unless_there(connection, workers, unseen_worker(worker_id))
    locked = select(workers.c.worker_id).where(workers.c.worker_id.in_(worker_ids))
    await connection.execute(locked.order_by(workers.c.worker_id).with_for_update())


async def _free_for_us(connection: AsyncConnection, model_ids: Collection[str]) -> list[str]:
    """Those that still wait, locked; in the order given.

    Whoever holds a model's row may be about to ask for a worker's, which are ours: so none is waited for.
    """
    still = models.c.model_id.in_(model_ids) & (models.c.state == "accepted") & (models.c.worker_id == "")
    locked = await connection.scalars(select(models.c.model_id).where(still).with_for_update(skip_locked=True))
    free = set(locked)
    return [model_id for model_id in model_ids if model_id in free]


async def _give(connection: AsyncConnection, model_id: str, worker_id: str, taken: set[int], slots: int) -> bool:
    slot = _lowest_free(taken, slots)
    row = {"worker_id": worker_id, "slot": slot, "model_id": model_id}
    if slot is None or not await insert_unless_there(connection, placements, row):
        return False
    taken.add(slot)
    return await changes_rows(connection, _of(model_id).values(worker_id=worker_id))


async def _taken_slots(connection: AsyncConnection, worker_ids: Collection[str]) -> Mapping[str, set[int]]:
    taken: defaultdict[str, set[int]] = defaultdict(set)
    rows = select(placements.c.worker_id, placements.c.slot).where(placements.c.worker_id.in_(worker_ids))
    for worker_id, slot in (await connection.execute(rows)).all():
        taken[worker_id].add(slot)
    return taken


def _selected(model_id: str) -> Select[Any]:
    return select_records(models, Model).where(models.c.model_id == model_id)


def _of(model_id: str) -> Update:
    return update(models).where(models.c.model_id == model_id)


async def _locked_model(connection: AsyncConnection, model_id: str) -> Model | None:
    """Until the commit nobody else places or ends it. On SQLite the whole transaction holds the write lock."""
    return await fetch_one(connection, Model, _selected(model_id).with_for_update())


async def _take_slot(connection: AsyncConnection, model_id: str, worker_id: str, slots: int) -> None:
    """The lowest free one, if there is any."""
    slot = _lowest_free((await _taken_slots(connection, [worker_id]))[worker_id], slots)
    if slot is not None:
        row = {"worker_id": worker_id, "slot": slot, "model_id": model_id}
        await insert_unless_there(connection, placements, row)


def _lowest_free(taken: set[int], slots: int) -> int | None:
    """None when as many are taken as there are, also above a limit that has been lowered since."""
    if len(taken) >= slots:
        return None
    return next(slot for slot in range(slots) if slot not in taken)
