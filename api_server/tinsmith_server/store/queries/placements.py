"""Places: which slot of which worker a model holds from before its creation until its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Select, Update, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.base import Queries, fetch_one, insert_unless_there, select_records
from tinsmith_server.store.queries.workers import unseen_worker
from tinsmith_server.store.records import Model
from tinsmith_server.store.tables import models, placements, workers


class PlacementQueries(Queries):
    """The part of `Store` about places at workers."""

    async def place_model(self, model_id: str, worker_id: str, slots: int | None) -> Model | None:
        async def place(connection: AsyncConnection) -> Model | None:
            model = await _locked_model(connection, model_id)
            if model is None or model.worker_id or model.state != "accepted":
                return model
            if slots is not None and not await _take_slot(connection, model_id, worker_id, slots):
                return None
            await connection.execute(_of(model_id).values(worker_id=worker_id))
            return await fetch_one(connection, Model, _selected(model_id))

        return await self._database.write(place)

    async def bind_where_made(self, model_id: str, worker_id: str, slots: int | None) -> bool:
        async def bind(connection: AsyncConnection) -> bool:
            model = await _locked_model(connection, model_id)
            if model is None or model.state != "accepted":
                return model is not None and (model.worker_id, model.state) == (worker_id, "bound")
            if model.worker_id != worker_id:
                await connection.execute(delete(placements).where(placements.c.model_id == model_id))
                if slots is not None:
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


def _selected(model_id: str) -> Select[Any]:
    return select_records(models, Model).where(models.c.model_id == model_id)


def _of(model_id: str) -> Update:
    return update(models).where(models.c.model_id == model_id)


async def _locked_model(connection: AsyncConnection, model_id: str) -> Model | None:
    """Until the commit nobody else places or ends it. On SQLite the whole transaction holds the write lock."""
    return await fetch_one(connection, Model, _selected(model_id).with_for_update())


async def _take_slot(connection: AsyncConnection, model_id: str, worker_id: str, slots: int) -> bool:
    """One at a time for each worker, by a lock on its row: two that read at once would want the same slot."""
    await insert_unless_there(connection, workers, unseen_worker(worker_id))
    await connection.execute(select(workers.c.worker_id).where(workers.c.worker_id == worker_id).with_for_update())
    taken = await connection.scalars(select(placements.c.slot).where(placements.c.worker_id == worker_id))
    slot = _lowest_free(set(taken), slots)
    if slot is None:
        return False
    row = {"worker_id": worker_id, "slot": slot, "model_id": model_id}
    return await insert_unless_there(connection, placements, row)


def _lowest_free(taken: set[int], slots: int) -> int | None:
    """None when as many are taken as there are, also above a limit that has been lowered since."""
    if len(taken) >= slots:
        return None
    return next(slot for slot in range(slots) if slot not in taken)
