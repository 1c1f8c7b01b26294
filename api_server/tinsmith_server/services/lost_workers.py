"""Models whose worker is gone for ever: they end, and say where their checkpoints are."""

from __future__ import annotations

from tinsmith_server.fleet.base import Fleet
from tinsmith_server.logs import get_logger
from tinsmith_server.services.failures import Failure
from tinsmith_server.store.base import Store

log = get_logger(__name__)

CURE = "its checkpoints stand: list them with `tinker checkpoint list`, and go on from the last one"


class LostWorkers:
    """Level-triggered. A worker that is suspended, or that nobody can reach, is not lost."""

    def __init__(self, store: Store, fleet: Fleet) -> None:
        self._store = store
        self._fleet = fleet

    async def write_off(self) -> None:
        """Models that were not yet bound are placed anew instead, by `Binding`."""
        for worker in await self._store.workers_with_live_models():
            reason = await self._fleet.lost_for_ever(worker)
            if reason is not None:
                await self._corrupt_models(worker.worker_id, reason)

    async def _corrupt_models(self, worker_id: str, reason: str) -> None:
        for model in await self._store.models_of_worker(worker_id, ["bound"]):
            failure = Failure("server", f"{model.model_id} is lost: {reason}; {CURE}")
            await self._store.end_model(model.model_id, "corrupted", failure.to_row())
            log.error("model corrupted", model_id=model.model_id, worker_id=worker_id, reason=reason)
