"""Training runs: the models of a tenant, with their state, progress and newest checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from tinsmith_rpc import worker_pb2

from tinsmith_server.services.background.inspection import Inspection
from tinsmith_server.services.failures import Failure
from tinsmith_server.services.rows import in_steps, owned_model
from tinsmith_server.services.training.binding import Binding
from tinsmith_server.services.training.slot_assignment import Wait
from tinsmith_server.store.records import Checkpoint, Clock, Model, Page, RunProgress, utc_now
from tinsmith_server.store.store import Store

NAME = "name"
"""The key of a model's `user_metadata` with a name for people, which `tinsmith train` sets."""
TOTAL_STEPS = "tinsmith-total-steps"
"""The key of a model's `user_metadata` with the number of steps that its program will run."""

RunState = Literal["waiting", "ready", "parked", "released", "failed", "corrupted"]


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A model with all that a list of runs shows. `status` is None if no running worker has described the model."""

    model: Model
    display_name: str | None
    last_checkpoint: Checkpoint | None
    last_sampler_checkpoint: Checkpoint | None
    progress: RunProgress | None
    status: worker_pb2.ModelStatus | None
    wait: Wait | None

    @property
    def state(self) -> RunState:
        match self.model.state:
            case "accepted":
                return "waiting"
            case "bound":
                return "parked" if self.status is not None and self.status.parked else "ready"
            case ended:
                return ended

    @property
    def last_request_at(self) -> datetime:
        """The time of the last known request, which for a model is not stored at each request."""
        stepped = self.progress.at if self.progress is not None else None
        return max(self.model.last_request_at, stepped or self.model.last_request_at)

    @property
    def failure(self) -> str | None:
        return None if self.model.failure is None else Failure.from_row(self.model.failure).message

    @property
    def total_steps(self) -> int | None:
        """The number of steps that the client has reported, or has named when it created the model."""
        if self.progress is not None and self.progress.total_steps is not None:
            return self.progress.total_steps
        text = (self.model.user_metadata or {}).get(TOTAL_STEPS, "")
        return int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else None

    @property
    def eta_seconds(self) -> float | None:
        """The time that the remaining steps take at the latest rate. None if the run has ended, or is not measured."""
        seconds = self.progress.seconds_per_step if self.progress is not None else None
        if self.progress is None or seconds is None or self.total_steps is None or self.model.state != "bound":
            return None
        return max(0, self.total_steps - self.progress.step) * seconds


class Runs:
    """The training runs of all tenants."""

    def __init__(self, store: Store, binding: Binding, inspection: Inspection, clock: Clock = utc_now) -> None:
        self._store = store
        self._binding = binding
        self._inspection = inspection
        self._clock = clock

    async def page(self, tenant: str, limit: int, offset: int, project_id: str | None = None) -> Page[TrainingRun]:
        """Return a page of the tenant's runs, newest first."""

        async def read(limit: int, offset: int) -> Page[Model]:
            return await self._store.list_models(tenant, limit, offset, project_id)

        page = await in_steps(read, limit, offset)
        return Page(tuple(await self._described(page.rows)), page.total)

    async def run(self, tenant: str, run_id: str) -> TrainingRun:
        """Return a run. Raises NotFound."""
        [run] = await self._described([await owned_model(self._store, tenant, run_id)])
        return run

    async def _described(self, models: Sequence[Model]) -> list[TrainingRun]:
        run_ids = [model.model_id for model in models]
        progress = await self._store.progress_of(run_ids)
        newest = await self._store.newest_checkpoints(run_ids, self._clock())
        checkpoints = {(one.run_id, one.type): one for one in newest}
        names = await self._store.session_names({model.session_id for model in models})
        waits = await self._binding.waits_of([model for model in models if model.state == "accepted"])
        return [
            TrainingRun(
                model=model,
                display_name=(model.user_metadata or {}).get(NAME) or names.get(model.session_id),
                last_checkpoint=checkpoints.get((model.model_id, "training")),
                last_sampler_checkpoint=checkpoints.get((model.model_id, "sampler")),
                progress=progress.get(model.model_id),
                status=self._inspection.models.get(model.model_id) if model.state == "bound" else None,
                wait=waits.get(model.model_id),
            )
            for model in models
        ]
