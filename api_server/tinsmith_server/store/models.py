"""Models: the adapters that clients train, and the worker each lives at."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import update

from tinsmith_server.store.queries import Queries
from tinsmith_server.store.records import Model, ModelState, Page
from tinsmith_server.store.rows import newest_first, select_records, values
from tinsmith_server.store.tables import models

_FINAL: tuple[ModelState, ...] = ("released", "failed", "corrupted")


class ModelQueries(Queries):
    """The part of `Store` about models."""

    async def add_model(self, model: Model) -> Model:
        numbered = (models.c.session_id == model.session_id) & (models.c.model_seq_id == model.model_seq_id)
        made = select_records(models, Model).where(numbered)
        return await self._insert_or_find(Model, models, values(model), made)

    async def get_model(self, model_id: str) -> Model | None:
        return await self._read_one(Model, select_records(models, Model).where(models.c.model_id == model_id))

    async def set_model_state(self, model_id: str, state: ModelState, failure: str | None = None) -> None:
        changeable = (models.c.model_id == model_id) & models.c.state.not_in(_FINAL)
        await self._write(update(models).where(changeable).values(state=state, failure=failure))

    async def touch_model(self, model_id: str, now: datetime) -> None:
        older = (models.c.model_id == model_id) & (models.c.last_request_at < now)
        await self._write(update(models).where(older).values(last_request_at=now))

    async def list_models(self, tenant: str, limit: int, offset: int) -> Page[Model]:
        query = (
            select_records(models, Model)
            .where(models.c.tenant == tenant, models.c.state != "failed")
            .order_by(*newest_first(models.c.created_at, models.c.model_id))
        )
        return await self._read_page(Model, query, limit, offset)

    async def models_of_session(self, session_id: str) -> Sequence[Model]:
        query = select_records(models, Model).where(models.c.session_id == session_id)
        return await self._read_all(Model, query.order_by(models.c.model_seq_id))

    async def models_of_worker(self, worker_id: str, states: Sequence[ModelState]) -> Sequence[Model]:
        placed = (models.c.worker_id == worker_id) & models.c.state.in_(states)
        query = select_records(models, Model).where(placed).order_by(models.c.created_at, models.c.model_id)
        return await self._read_all(Model, query)
