"""Capacity: which slot of which worker a model holds from before its creation until its end, and the line for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping

from sqlalchemy import Update, bindparam, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.queries.base import (
    Queries,
    changes_rows,
    fetch_all,
    fetch_one,
    insert_unless_there,
    select_records,
)
from tinsmith_server.store.queries.models import unseen_worker
from tinsmith_server.store.records import Model, PlacementQueue, SlotHolder, WaitingModel
from tinsmith_server.store.tables import models, placements, sessions, workers

ChooseSlots = Callable[[PlacementQueue], Mapping[str, str]]
"""Of a line: which models get a place now, and at which worker. It only decides: a transaction waits for it."""

_AT_WORKERS = placements.c.worker_id.in_(bindparam("worker_ids"))
_WAITS = (models.c.state == "accepted") & (models.c.worker_id == "")

_WAITING = (
    select_records(models, WaitingModel)
    .where(_WAITS & models.c.base_model.in_(bindparam("base_models")))
    .order_by(models.c.created_at, models.c.model_id)
)
_HOLDERS = (
    select(*(models.c[name] for name in ("model_id", "session_id", "tenant", "last_request_at")))
    .add_columns(placements.c.worker_id)
    .join(placements, placements.c.model_id == models.c.model_id)
    .where(_AT_WORKERS)
)
_AT_WORK = select(sessions.c.tenant).where(sessions.c.finished_at.is_(None)).distinct()

_KNOWN = select(workers.c.worker_id).where(workers.c.worker_id.in_(bindparam("worker_ids")))
_LOCKED = _KNOWN.order_by(workers.c.worker_id).with_for_update()
_TAKEN = select(placements.c.worker_id, placements.c.slot).where(_AT_WORKERS)
_STILL_WAIT = (
    select(models.c.model_id)
    .where(_WAITS & models.c.model_id.in_(bindparam("model_ids")))
    .with_for_update(skip_locked=True)
)
_PLACE = update(models).where(models.c.model_id == bindparam("placed")).values(worker_id=bindparam("at_worker"))
_MODEL = select_records(models, Model).where(models.c.model_id == bindparam("model_id"))
_MODEL_LOCKED = _MODEL.with_for_update()


class PlacementQueries(Queries):
    """The part of `Store` about places at workers."""

    async def placement_queue(self, base_models: Collection[str], worker_ids: Collection[str]) -> PlacementQueue:
        """The models of these base models that wait for a place, and who holds the places of these workers."""
        return await self._database.read(lambda connection: _queue(connection, base_models, worker_ids))

    async def place_models(
        self, base_models: Collection[str], slots: Mapping[str, int], choose: ChooseSlots
    ) -> Mapping[str, str]:
        """Gives models of the line the places that `choose` gives them; `slots` says how many a worker has.

        One at a time for each worker, whichever replica calls: `choose` sees the line as it is, and what it gives
        holds. What another caller has in hand at that moment, or what would be one too many, is left out. Returns
        who got a place, and at which worker.
        """

        async def place(connection: AsyncConnection) -> Mapping[str, str]:
            await _lock_workers(connection, slots)
            assignments = choose(await _queue(connection, base_models, slots))
            taken = await _taken_slots(connection, slots)
            return {
                model_id: worker_id
                for model_id in await _free_for_us(connection, assignments)
                if await _place(
                    connection, model_id, worker_id := assignments[model_id], taken[worker_id], slots[worker_id]
                )
            }

        return await self._database.write(place)

    async def bind_where_made(self, model_id: str, worker_id: str, slots: int) -> bool:
        """Binds an accepted model to the worker that has made it, wherever it was placed meanwhile.

        It is at home there even if its slot has been given away since. False when it is bound elsewhere, has
        ended, or is not known: a bound model never moves, so that of several workers that made it one has it.
        """
        known = await self._look_up(Model, _MODEL, {"model_id": model_id})
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
        """Takes an accepted model away from the worker that refused it. A bound one stays."""

        async def displace(connection: AsyncConnection) -> None:
            model = await _locked_model(connection, model_id)
            if model is not None and (model.worker_id, model.state) == (worker_id, "accepted"):
                await connection.execute(_of(model_id).values(worker_id=""))
                await connection.execute(delete(placements).where(placements.c.model_id == model_id))

        await self._database.write(displace)

    async def used_slots(self) -> Mapping[str, int]:
        """By worker; those without any are missing."""

        async def count(connection: AsyncConnection) -> Mapping[str, int]:
            rows = select(placements.c.worker_id, func.count()).group_by(placements.c.worker_id)
            return dict((await connection.execute(rows)).all())

        return await self._database.read(count)


async def _queue(
    connection: AsyncConnection, base_models: Collection[str], worker_ids: Collection[str]
) -> PlacementQueue:
    waiting = await fetch_all(connection, WaitingModel, _WAITING, {"base_models": list(base_models)})
    holders = await fetch_all(connection, SlotHolder, _HOLDERS, {"worker_ids": list(worker_ids)})
    at_work = (await connection.scalars(_AT_WORK)).all()
    return PlacementQueue(waiting=tuple(waiting), holders=tuple(holders), tenants_at_work=frozenset(at_work))


async def _lock_workers(connection: AsyncConnection, worker_ids: Collection[str]) -> None:
    """In one order for all: two that read the same free slot at once would both want it."""
    of_these = {"worker_ids": list(worker_ids)}
    for worker_id in sorted(set(worker_ids) - set(await connection.scalars(_KNOWN, of_these))):
        await insert_unless_there(connection, workers, unseen_worker(worker_id))
    await connection.execute(_LOCKED, of_these)


async def _free_for_us(connection: AsyncConnection, model_ids: Collection[str]) -> list[str]:
    """Those that still wait, locked; in the order given.

    Whoever holds a model's row may be about to ask for a worker's, which are ours: so none is waited for.
    """
    free = set(await connection.scalars(_STILL_WAIT, {"model_ids": list(model_ids)}))
    return [model_id for model_id in model_ids if model_id in free]


async def _place(connection: AsyncConnection, model_id: str, worker_id: str, taken: set[int], slots: int) -> bool:
    slot = _lowest_free(taken, slots)
    row = {"worker_id": worker_id, "slot": slot, "model_id": model_id}
    if slot is None or not await insert_unless_there(connection, placements, row):
        return False
    taken.add(slot)
    return await changes_rows(connection, _PLACE, {"placed": model_id, "at_worker": worker_id})


async def _taken_slots(connection: AsyncConnection, worker_ids: Collection[str]) -> Mapping[str, set[int]]:
    taken: defaultdict[str, set[int]] = defaultdict(set)
    for worker_id, slot in await connection.execute(_TAKEN, {"worker_ids": list(worker_ids)}):
        taken[worker_id].add(slot)
    return taken


def _of(model_id: str) -> Update:
    return update(models).where(models.c.model_id == model_id)


async def _locked_model(connection: AsyncConnection, model_id: str) -> Model | None:
    """Until the commit nobody else places or ends it. On SQLite the whole transaction holds the write lock."""
    return await fetch_one(connection, Model, _MODEL_LOCKED, {"model_id": model_id})


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
