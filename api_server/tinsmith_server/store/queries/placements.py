"""Queries about slots. Each model holds one slot of a worker from its placement until its end."""

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
from tinsmith_server.store.records import Model, PlacementQueue, QueuedModel, SlotHolder
from tinsmith_server.store.tables import models, placements, sessions, workers

ChooseSlots = Callable[[PlacementQueue], Mapping[str, str]]
"""A function that assigns slots to models of a queue.

The function must only compute, because a transaction waits for the result.
"""

_AT_WORKERS = placements.c.worker_id.in_(bindparam("worker_ids"))
_WAITS = (models.c.state == "accepted") & (models.c.worker_id == "")

_WAITING = (
    select_records(models, QueuedModel)
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
    """The queries about slots."""

    async def placement_queue(self, base_models: Collection[str], worker_ids: Collection[str]) -> PlacementQueue:
        """Return the waiting models of these base models, and the models that hold slots of these workers."""
        return await self._database.read(lambda connection: _queue(connection, base_models, worker_ids))

    async def place_models(
        self, base_models: Collection[str], slots: Mapping[str, int], choose: ChooseSlots
    ) -> Mapping[str, str]:
        """Assign slots to waiting models as `choose` decides. `slots` is the number of slots of each worker.

        Assignments for one worker run one at a time, at all replicas together, so `choose` sees the current queue. A
        model is left out if another transaction is changing it now, or if the worker has no free slot. Returns the
        assigned models, with their workers.
        """

        async def place(connection: AsyncConnection) -> Mapping[str, str]:
            await _lock_workers(connection, slots)
            assignments = choose(await _queue(connection, base_models, slots))
            taken = await _taken_slots(connection, slots)
            return {
                model_id: worker_id
                for model_id in await _lock_waiting(connection, assignments)
                if await _place(
                    connection, model_id, worker_id := assignments[model_id], taken[worker_id], slots[worker_id]
                )
            }

        return await self._database.write(place)

    async def bind_to_creator(self, model_id: str, worker_id: str, slots: int) -> bool:
        """Bind an accepted model to the worker that has created it, even if the model is now placed at another worker.

        The model is bound even if another model now holds the slot. Returns False if the model is bound to another
        worker, has ended, or is unknown. A bound model never moves. So if several workers created the model, only one
        worker keeps the model.
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
        """Take an accepted model from the worker that refused it. A model that is bound stays at its worker."""

        async def displace(connection: AsyncConnection) -> None:
            model = await _locked_model(connection, model_id)
            if model is not None and (model.worker_id, model.state) == (worker_id, "accepted"):
                await connection.execute(_of(model_id).values(worker_id=""))
                await connection.execute(delete(placements).where(placements.c.model_id == model_id))

        await self._database.write(displace)

    async def used_slots(self) -> Mapping[str, int]:
        """Return the number of used slots of each worker. Workers without used slots are left out."""

        async def count(connection: AsyncConnection) -> Mapping[str, int]:
            rows = select(placements.c.worker_id, func.count()).group_by(placements.c.worker_id)
            return dict((await connection.execute(rows)).all())

        return await self._database.read(count)


async def _queue(
    connection: AsyncConnection, base_models: Collection[str], worker_ids: Collection[str]
) -> PlacementQueue:
    waiting = await fetch_all(connection, QueuedModel, _WAITING, {"base_models": list(base_models)})
    holders = await fetch_all(connection, SlotHolder, _HOLDERS, {"worker_ids": list(worker_ids)})
    at_work = (await connection.scalars(_AT_WORK)).all()
    return PlacementQueue(waiting=tuple(waiting), holders=tuple(holders), tenants_at_work=frozenset(at_work))


async def _lock_workers(connection: AsyncConnection, worker_ids: Collection[str]) -> None:
    """Lock the rows of the workers. All replicas lock the rows in the same order.

    Without the lock, two replicas could read and assign the same free slot.
    """
    of_these = {"worker_ids": list(worker_ids)}
    for worker_id in sorted(set(worker_ids) - set(await connection.scalars(_KNOWN, of_these))):
        await insert_unless_there(connection, workers, unseen_worker(worker_id))
    await connection.execute(_LOCKED, of_these)


async def _lock_waiting(connection: AsyncConnection, model_ids: Collection[str]) -> list[str]:
    """Lock and return the models that still wait, in the order of `model_ids`.

    Models that another transaction has locked are skipped, because the other transaction may wait for a worker's row
    that this transaction has locked.
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
    """Return the model, which stays locked until the commit. On SQLite the whole transaction holds the write lock."""
    return await fetch_one(connection, Model, _MODEL_LOCKED, {"model_id": model_id})


async def _take_slot(connection: AsyncConnection, model_id: str, worker_id: str, slots: int) -> None:
    """Take the lowest free slot if any slot is free."""
    slot = _lowest_free((await _taken_slots(connection, [worker_id]))[worker_id], slots)
    if slot is not None:
        row = {"worker_id": worker_id, "slot": slot, "model_id": model_id}
        await insert_unless_there(connection, placements, row)


def _lowest_free(taken: set[int], slots: int) -> int | None:
    """Return the lowest free slot, or None if all slots are used.

    After the limit was lowered, more slots than the limit may be used.
    """
    if len(taken) >= slots:
        return None
    return next(slot for slot in range(slots) if slot not in taken)
