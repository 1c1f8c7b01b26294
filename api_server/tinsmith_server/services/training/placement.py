"""Which worker gets a new model, and what those wait for that none can take."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from tinsmith_server.fleet.base import Fleet, WorkerHandle
from tinsmith_server.store.base import Store
from tinsmith_server.store.records import Model

# A slot that another replica frees is found by asking the store again.
RECHECK_SECONDS = 2.0


class Placement:
    """Models that want the same wait in one line, whichever replica accepted them.

    At each replica one of them looks for a slot, and the others wait for that.
    """

    def __init__(self, store: Store, fleet: Fleet) -> None:
        self._store = store
        self._fleet = fleet
        self._turns: defaultdict[tuple[str, int], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._reasons: dict[tuple[str, int], str] = {}
        self._waiting: set[str] = set()

    async def until_placed(self, model: Model, refused_by: Collection[str]) -> Model:
        """The model once it has a worker, or has ended. Those that have refused it before are asked last."""
        self._waiting.add(model.model_id)
        try:
            while not await self._gets_turn(model):
                # Whoever has the turn, here or elsewhere, may have placed it.
                current = await self._store.get_model(model.model_id) or model
                if _is_settled(current):
                    return current
            try:
                return await self._until_placed(model, refused_by)
            finally:
                self._turns[_wants(model)].release()
        finally:
            self._waiting.discard(model.model_id)

    async def _gets_turn(self, model: Model) -> bool:
        try:
            async with asyncio.timeout(RECHECK_SECONDS):
                return await self._turns[_wants(model)].acquire()
        except TimeoutError:
            return False

    def reason(self, model: Model) -> str | None:
        """What a model waits for that has no worker."""
        return self._reasons.get(_wants(model)) if model.model_id in self._waiting else None

    def may_stay(self, model: Model) -> bool:
        """Whether the worker at which the model is placed still takes new ones."""
        return any(worker.worker_id == model.worker_id for worker in self._trainers(model))

    async def _until_placed(self, model: Model, refused_by: Collection[str]) -> Model:
        while True:
            seen = self._fleet.changes.count
            placed = await self._place(model, refused_by)
            if placed is not None:
                return placed
            self._reasons[_wants(model)] = await self._why_not(model)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECHECK_SECONDS):
                    await self._fleet.changes.beyond(seen)

    async def _place(self, model: Model, refused_by: Collection[str]) -> Model | None:
        """Serves the line that all replicas share: whoever finds a slot gives it to the model that came first."""
        while True:
            current = await self._store.get_model(model.model_id) or model
            if _is_settled(current):
                return current
            first = await self._store.first_without_place(model.base_model, model.lora_rank) or current
            refusers = refused_by if first.model_id == model.model_id else ()
            if await self._give_slot(first, refusers) is None:
                return None

    async def _give_slot(self, model: Model, refused_by: Collection[str]) -> Model | None:
        used = await self._store.used_slots()
        for worker in fullest_first(self._trainers(model), used, refused_by):
            if worker.slots is not None and used.get(worker.worker_id, 0) >= worker.slots:
                continue
            placed = await self._store.place_model(model.model_id, worker.worker_id, worker.slots)
            if placed is not None:
                return placed
        return None

    async def _why_not(self, model: Model) -> str:
        """Asks for more capacity, and says what happens next."""
        next_step = await self._fleet.provide(model.base_model, rank=model.lora_rank)
        workers = self._trainers(model)
        if not workers:
            return next_step
        slots = sum(worker.slots or 0 for worker in workers)
        of = "the worker" if len(workers) == 1 else f"the {len(workers)} workers"
        return f"all {slots} adapter slots of {of} of {model.base_model} are taken; {next_step}"

    def _trainers(self, model: Model) -> Sequence[WorkerHandle]:
        return self._fleet.trainers(model.base_model, model.lora_rank)


def fullest_first(
    workers: Sequence[WorkerHandle], used: Mapping[str, int], refused_by: Collection[str]
) -> list[WorkerHandle]:
    """Full workers fill up and others run empty, so that whole GPUs can be given back."""
    return sorted(workers, key=lambda one: (one.worker_id in refused_by, -used.get(one.worker_id, 0), one.worker_id))


def _is_settled(model: Model) -> bool:
    """It has a place, or needs none any more."""
    return bool(model.worker_id) or model.state != "accepted"


def _wants(model: Model) -> tuple[str, int]:
    return model.base_model, model.lora_rank
