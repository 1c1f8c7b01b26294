"""Where a new model goes: in line with those that want the same workers, and to one of them in its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from tinsmith_server.fleet.base import Changes, Fleet
from tinsmith_server.services.training.placement_rounds import PlacementRounds
from tinsmith_server.store.records import Clock, Model, utc_now
from tinsmith_server.store.store import Store


class Placement:
    """Models that want the same workers wait in one line, whichever replica accepted them."""

    def __init__(self, store: Store, fleet: Fleet, freed: Changes, kept: int, clock: Clock = utc_now) -> None:
        """`freed` is noted when a place may have come free here; `kept` places are left to tenants without any."""
        self._store = store
        self._fleet = fleet
        self._freed = freed
        self._kept = kept
        self._clock = clock
        self._keepers: dict[str, PlacementRounds] = {}

    async def wait_until_placed(self, model: Model, refused_by: Collection[str]) -> Model:
        """The model once it has a worker, or has ended. Those that have refused it before are asked last."""
        weights = self._weights(model.base_model)
        keeper = self._keepers.get(weights) or self._keepers.setdefault(weights, self._keeper(weights))
        return await keeper.wait_until_placed(model, refused_by)

    def reason(self, model: Model) -> str | None:
        """What a model waits for that waits here for a place."""
        keeper = self._keepers.get(self._weights(model.base_model))
        return keeper.reason(model) if keeper is not None else None

    async def reasons(self, models: Sequence[Model]) -> Mapping[str, str]:
        """What those of `models` wait for that have no place, whichever replica they wait at."""
        found: dict[str, str] = {}
        for weights in {self._weights(model.base_model) for model in models}:
            keeper = self._keepers.get(weights) or self._keeper(weights)
            await keeper.look()
            found |= {model.model_id: reason for model in models if (reason := keeper.reason(model)) is not None}
        return found

    def note_free(self) -> None:
        """A place may have come free."""
        self._freed.note()

    def may_stay(self, model: Model) -> bool:
        """Whether the worker at which the model is placed still takes new ones."""
        trainers = self._fleet.trainers(model.base_model, model.lora_rank)
        return any(worker.worker_id == model.worker_id for worker in trainers)

    async def close(self) -> None:
        await asyncio.gather(*(keeper.close() for keeper in self._keepers.values()))

    def _keeper(self, weights: str) -> PlacementRounds:
        return PlacementRounds(self._store, self._fleet, weights, self._freed, self._kept, self._clock)

    def _weights(self, base_model: str) -> str:
        """Names of the same weights have the same workers, so they share a line."""
        served = self._fleet.model(base_model)
        return served.weights if served is not None else base_model
