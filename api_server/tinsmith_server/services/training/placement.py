"""The placement of accepted models on workers. All replicas use the same order for a queue."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tinsmith_server.errors import TinsmithError
from tinsmith_server.fleet.base import Changes, Fleet
from tinsmith_server.logs import get_logger
from tinsmith_server.services.training.slot_assignment import Capacity, QueuePosition, Wait, assign_slots, fair_order
from tinsmith_server.store.records import Clock, Model, PlacementQueue, utc_now
from tinsmith_server.store.store import Store

log = get_logger(__name__)

# A slot that another replica frees becomes known only by another read of the store.
RECHECK_SECONDS = 2.0
# With this pause, a thousand creations that arrive at once cause a few reads of the queue instead of a thousand.
BATCH_DELAY_SECONDS = 0.1
# An assignment that another replica makes at the same moment becomes visible when its transaction ends.
CONFLICT_WAIT_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class _Waiter:
    model: Model
    refused_by: Collection[str]
    placed: asyncio.Future[Model]


class PlacementRounds:
    """The placement of waiting models on workers with the same weights, in rounds.

    A round reads the store once for all models that wait. A round writes to the store only if the round can assign a
    slot. After a round that assigned a slot, the next round writes without reading first.
    """

    def __init__(self, store: Store, fleet: Fleet, weights: str, freed: Changes, kept: int, clock: Clock) -> None:
        """Start, with no waiters.

        `weights` is the name of the queue; `freed` is notified when a slot may be free.
        """
        self._store = store
        self._fleet = fleet
        self._weights = weights
        self._freed = freed
        self._kept = kept
        self._clock = clock
        self._waiters: dict[str, _Waiter] = {}
        self._rounds: asyncio.Task[None] | None = None
        self._queue = PlacementQueue()
        self._positions: dict[str, int] | None = None
        self._next_steps: dict[tuple[str, int], str] = {}
        self._failure: str | None = None
        self._there_was_room = False

    async def wait_until_placed(self, model: Model, refused_by: Collection[str]) -> Model:
        """Return the model when it has a worker, or has ended."""
        waiter = _Waiter(model, refused_by, asyncio.get_running_loop().create_future())
        self._waiters[model.model_id] = waiter
        self._freed.note()
        if self._rounds is None or self._rounds.done():
            name = f"placement of {self._weights}"
            self._rounds = asyncio.create_task(self._run(), name=name, context=contextvars.Context())
        try:
            return await waiter.placed
        finally:
            if self._waiters.get(model.model_id) is waiter:
                del self._waiters[model.model_id]

    def reason(self, model: Model) -> str | None:
        """Return what the model waits for. The model must have been in the queue at the last read of the queue."""
        number = self.number(model)
        if self._failure is not None or number is None:
            return self._failure
        slots = sum(self._capacity().slots.values())
        wait = QueuePosition(number, len(self._queue.waiting), slots, model.base_model, model.tenant)
        next_step = self._next_steps.get((model.base_model, model.lora_rank), "")
        return wait.sentence(self._queue.holders, next_step, self._clock())

    def number(self, model: Model) -> int | None:
        """Return the model's number in the queue, from 1. Return None if the last read did not find the model."""
        if self._positions is None:
            self._positions = {one.model_id: number for number, one in enumerate(fair_order(self._queue), 1)}
        return self._positions.get(model.model_id)

    async def look(self) -> None:
        """Read the queue, and keep the result."""
        await self._look(self._capacity())

    async def close(self) -> None:
        if self._rounds is not None:
            self._rounds.cancel()
            await asyncio.gather(self._rounds, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiters:
            seen = self._fleet.changes.count, self._freed.count
            try:
                placed = await self._round()
                self._failure = None
            except TinsmithError as error:
                placed, self._failure = False, str(error)
            except Exception as error:
                # The loop continues after any error. Otherwise the waiters would wait forever.
                log.exception("models not placed", base_model=self._weights)
                placed, self._failure = False, repr(error)
            if self._waiters and not placed:
                await self._pause(*seen)

    async def _round(self) -> bool:
        """Run one round.

        Return whether this or another replica assigned a slot. After an assignment, more slots may be free.
        """
        waiters, capacity = dict(self._waiters), self._capacity()
        if self._there_was_room and await self._place(waiters, capacity):
            return True
        waiting, assigned = await self._look(capacity)
        if assigned:
            if not await self._place(waiters, capacity):
                await asyncio.sleep(CONFLICT_WAIT_SECONDS)
            return True
        await self._wake_settled(waiters, waiting)
        await self._ask_for_more()
        return False

    async def _place(self, waiters: dict[str, _Waiter], capacity: Capacity) -> bool:
        placed = await self._store.place_models(
            self._names(), capacity.slots, lambda queue: assign_slots(queue, capacity)
        )
        for model_id in placed.keys() & waiters.keys():
            self._wake(waiters[model_id], replace(waiters[model_id].model, worker_id=placed[model_id]))
        self._there_was_room = bool(placed)
        return self._there_was_room

    async def _wake_settled(self, waiters: dict[str, _Waiter], waiting: Collection[str]) -> None:
        """Wake the waiters of models that left the queue: another replica placed the model, or its session ended."""
        for model_id in waiters.keys() - set(waiting):
            waiter = waiters[model_id]
            if not waiter.placed.done():
                model = await self._store.get_model(model_id)
                self._wake(waiter, model or replace(waiter.model, state="failed"))

    def _wake(self, waiter: _Waiter, model: Model) -> None:
        """Wake the waiter, and remove it immediately.

        A waiter that stays would cause a further round, which finds nothing and delays later waiters.
        """
        if not waiter.placed.done():
            waiter.placed.set_result(model)
        if self._waiters.get(model.model_id) is waiter:
            del self._waiters[model.model_id]

    async def _ask_for_more(self) -> None:
        """Request more capacity, once for each kind of model, and keep the returned messages."""
        kinds = {(waiter.model.base_model, waiter.model.lora_rank) for waiter in self._waiters.values()}
        for base_model, rank in sorted(kinds):
            self._next_steps[base_model, rank] = await self._fleet.provide(base_model, rank=rank)

    async def _pause(self, changes_seen: int, freed_seen: int) -> None:
        await asyncio.sleep(min(BATCH_DELAY_SECONDS, RECHECK_SECONDS))
        news = [
            asyncio.create_task(self._fleet.changes.beyond(changes_seen)),
            asyncio.create_task(self._freed.beyond(freed_seen)),
        ]
        try:
            await asyncio.wait(news, timeout=RECHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in news:
                one.cancel()

    async def _look(self, capacity: Capacity) -> tuple[Collection[str], Collection[str]]:
        """Read the queue. Return the models that wait, and the models that get a slot now and leave the queue."""
        queue = await self._store.placement_queue(self._names(), capacity.slots)
        assigned = assign_slots(queue, capacity)
        left = tuple(one for one in queue.waiting if one.model_id not in assigned)
        self._queue, self._positions = replace(queue, waiting=left), None
        return [one.model_id for one in queue.waiting], assigned

    def _names(self) -> list[str]:
        """Return all base model names that a model in this queue may have."""
        return [served.name for served in self._fleet.models if served.weights == self._weights] or [self._weights]

    def _capacity(self) -> Capacity:
        workers = {one.worker_id: one for name in self._names() for one in self._fleet.trainers(name, rank=0)}
        return Capacity(
            slots={worker_id: worker.slots for worker_id, worker in workers.items()},
            suits=lambda name, rank: [worker.worker_id for worker in self._fleet.trainers(name, rank)],
            kept=self._kept,
            refused_by={model_id: waiter.refused_by for model_id, waiter in self._waiters.items()},
        )


class Placement:
    """The placement of all models.

    Models for the same workers share a queue, even if different replicas accepted the models.
    """

    def __init__(self, store: Store, fleet: Fleet, freed: Changes, kept: int, clock: Clock = utc_now) -> None:
        """Start, with no queues.

        `freed` is notified when a slot at a worker may be free. The last `kept` slots are reserved for tenants without
        slots.
        """
        self._store = store
        self._fleet = fleet
        self._freed = freed
        self._kept = kept
        self._clock = clock
        self._keepers: dict[str, PlacementRounds] = {}

    async def wait_until_placed(self, model: Model, refused_by: Collection[str]) -> Model:
        """Return the model when it has a worker, or has ended. Workers in `refused_by` are chosen last."""
        weights = self._weights(model.base_model)
        keeper = self._keepers.get(weights) or self._keepers.setdefault(weights, self._keeper(weights))
        return await keeper.wait_until_placed(model, refused_by)

    def reason(self, model: Model) -> str | None:
        """Return what the model waits for. This replica must be placing the model."""
        keeper = self._keepers.get(self._weights(model.base_model))
        return keeper.reason(model) if keeper is not None else None

    async def waits(self, models: Sequence[Model]) -> Mapping[str, Wait]:
        """Return what each model without a slot waits for, even if another replica places the model."""
        found: dict[str, Wait] = {}
        for weights in {self._weights(model.base_model) for model in models}:
            keeper = self._keepers.get(weights) or self._keeper(weights)
            await keeper.look()
            own = [model for model in models if self._weights(model.base_model) == weights]
            found |= {model.model_id: Wait(keeper.reason(model), keeper.number(model)) for model in own}
        return found

    def note_free(self) -> None:
        """Record that a slot may be free."""
        self._freed.note()

    def may_stay(self, model: Model) -> bool:
        """Return whether the worker of the model still takes new models."""
        trainers = self._fleet.trainers(model.base_model, model.lora_rank)
        return any(worker.worker_id == model.worker_id for worker in trainers)

    async def close(self) -> None:
        await asyncio.gather(*(keeper.close() for keeper in self._keepers.values()))

    def _keeper(self, weights: str) -> PlacementRounds:
        return PlacementRounds(self._store, self._fleet, weights, self._freed, self._kept, self._clock)

    def _weights(self, base_model: str) -> str:
        """Return the name of the model's queue.

        Base models with the same weights share a queue, because the same workers serve these base models.
        """
        served = self._fleet.model(base_model)
        return served.weights if served is not None else base_model
