"""Queries about models, and about the workers of these models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Text, bindparam, cast, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.database import KEY
from tinsmith_server.store.queries.base import (
    Queries,
    changes_rows,
    fetch_made,
    insert_unless_there,
    newest_first,
    select_records,
    values,
)
from tinsmith_server.store.records import LIVE, FinalState, Model, ModelState, Page, Worker
from tinsmith_server.store.tables import deferred_operations, models, placements, sessions, workers

_OF_ID = models.c.model_id == bindparam("model")
_BY_ID = select_records(models, Model).where(_OF_ID)
_BY_NUMBER = select_records(models, Model).where(
    models.c.session_id == bindparam("session_id"), models.c.model_seq_id == bindparam("model_seq_id")
)
_BIND = (
    update(models)
    .where(_OF_ID, models.c.worker_id == bindparam("worker"), models.c.state.in_(LIVE))
    .values(state="bound")
)
_LIVE_OF_TENANT = (
    select(func.count()).select_from(models).where(models.c.tenant == bindparam("tenant"), models.c.state.in_(LIVE))
)


# The JSON is searched as text, because PostgreSQL's JSON operators refuse a string that contains NUL. In the text,
# quotes inside strings are escaped, so the pattern matches only a key.
_IS_A_RUN_OF_ITS_OWN = models.c.user_metadata.is_(None) | cast(models.c.user_metadata, Text).not_like(
    '%"tinsmith-purpose": %'
)


class ModelQueries(Queries):
    """The queries about models."""

    async def add_model(self, model: Model) -> Model:
        """Insert the model. If a model with the same (session_id, model_seq_id) exists, return the existing model."""
        row = values(model)
        return await self._insert_or_find(Model, models, row, _BY_NUMBER, row)

    async def get_model(self, model_id: str) -> Model | None:
        return await self._look_up(Model, _BY_ID, {"model": model_id})

    async def bind_model(self, model_id: str, worker_id: str) -> bool:
        """Mark the model as bound. Returns False if the model is not placed at this worker, or has ended."""
        return await self._write(_BIND, {"model": model_id, "worker": worker_id})

    async def end_model(
        self, model_id: str, state: FinalState, failure: str | None = None, *, only_unplaced: bool = False
    ) -> bool:
        """End the model, free its slot, and drop its deferred operations. Only the first end has an effect.

        With `only_unplaced`, a model that has been placed does not end. Returns False if nothing changed.
        """
        living = (models.c.model_id == model_id) & models.c.state.in_(LIVE)
        if only_unplaced:
            living &= models.c.worker_id == ""

        async def end(connection: AsyncConnection) -> bool:
            ended = await changes_rows(connection, update(models).where(living).values(state=state, failure=failure))
            if ended:
                await connection.execute(delete(placements).where(placements.c.model_id == model_id))
                await connection.execute(delete(deferred_operations).where(deferred_operations.c.model_id == model_id))
            return ended

        return await self._database.write(end)

    async def touch_model(self, model_id: str, now: datetime) -> None:
        older = (models.c.model_id == model_id) & (models.c.last_request_at < now)
        await self._write(update(models).where(older).values(last_request_at=now))

    async def list_models(self, tenant: str, limit: int, offset: int, project_id: str | None = None) -> Page[Model]:
        """Return a page of models, newest first. Failed creations are left out.

        Models with `tinsmith-purpose` in their user_metadata are left out, too, because commands make such models
        temporarily. With `project_id`, return only models of sessions in this project.
        """
        query = (
            select_records(models, Model)
            .where(models.c.tenant == tenant, models.c.state != "failed", _IS_A_RUN_OF_ITS_OWN)
            .order_by(*newest_first(models.c.created_at, models.c.model_id))
        )
        if project_id is not None:
            # The query finds a project's sessions by their tenant's index, and the sessions' models by key.
            in_project = select(sessions.c.session_id).where(
                sessions.c.tenant == tenant, sessions.c.project_id == project_id
            )
            query = query.where(models.c.session_id.in_(in_project))
        return await self._read_page(Model, query, limit, offset)

    async def live_models_of_session(self, session_id: str) -> Sequence[Model]:
        live = (models.c.session_id == session_id) & models.c.state.in_(LIVE)
        return await self._read_all(Model, select_records(models, Model).where(live).order_by(models.c.model_seq_id))

    async def model_ids_of_session(self, session_id: str) -> Sequence[str]:
        """Return the IDs of the session's models.

        Failed creations are left out, because the number of failed creations has no limit.
        """
        made = (models.c.session_id == session_id) & (models.c.state != "failed")
        return await self._read_ids(select(models.c.model_id).where(made).order_by(models.c.model_seq_id))

    async def models_of_worker(self, worker_id: str, states: Sequence[ModelState]) -> Sequence[Model]:
        placed = (models.c.worker_id == worker_id) & models.c.state.in_(states)
        query = select_records(models, Model).where(placed).order_by(models.c.created_at, models.c.model_id)
        return await self._read_all(Model, query)

    async def count_live_models(self, tenant: str) -> int:
        """Return the number of accepted and bound models."""
        return await self._count(_LIVE_OF_TENANT, {"tenant": tenant})

    async def accepted_models(self) -> Sequence[Model]:
        """Return the accepted models of all tenants, oldest first."""
        query = select_records(models, Model).where(models.c.state == "accepted")
        return await self._read_all(Model, query.order_by(models.c.created_at, models.c.model_id))

    async def unbound_models(self, tenant: str, limit: int) -> Sequence[Model]:
        """Return the tenant's accepted models, oldest first."""
        query = select_records(models, Model).where(models.c.state == "accepted", models.c.tenant == tenant)
        return await self._read_all(Model, query.order_by(models.c.created_at, models.c.model_id).limit(limit))


_EPOCH = select(workers.c.epoch).where(workers.c.worker_id == bindparam(KEY))
_WORKER_BY_ID = select_records(workers, Worker).where(workers.c.worker_id == bindparam("worker_id"))
_ADVANCE = (
    update(workers)
    .where(workers.c.worker_id == bindparam("worker"), workers.c.event_cursor < bindparam("event"))
    .values(event_cursor=bindparam("event"))
)


class WorkerQueries(Queries):
    """The queries about workers."""

    async def epoch_of(self, worker_id: str) -> int:
        """Return the epoch of the worker, or 0 if the worker is unknown. Every acknowledgement reads the epoch."""
        return await self._database.look_up_value(_EPOCH, worker_id) or 0

    async def get_worker(self, worker_id: str) -> Worker:
        """Return the worker. A new row has epoch 0, no instance, and cursor 0."""
        unseen = unseen_worker(worker_id)
        known = await self._look_up(Worker, _WORKER_BY_ID, unseen)
        return known or await self._insert_or_find(Worker, workers, unseen, _WORKER_BY_ID, unseen)

    async def raise_epoch(self, worker_id: str, expected_epoch: int, instance_id: str) -> Worker | None:
        """Raise the epoch to expected_epoch + 1, by compare-and-swap. Returns None if another replica was faster."""
        unchanged = (workers.c.worker_id == worker_id) & (workers.c.epoch == expected_epoch)
        raised = update(workers).where(unchanged).values(epoch=expected_epoch + 1, instance_id=instance_id)

        async def compare_and_swap(connection: AsyncConnection) -> Worker | None:
            await insert_unless_there(connection, workers, unseen_worker(worker_id))
            if not await changes_rows(connection, raised):
                return None
            return await fetch_made(connection, Worker, _WORKER_BY_ID, {"worker_id": worker_id})

        return await self._database.write(compare_and_swap)

    async def advance_cursor(self, worker_id: str, event_id: int) -> None:
        """Move the cursor forward. The cursor never moves back."""
        await self._write(_ADVANCE, {"worker": worker_id, "event": event_id})

    async def record_home(self, worker_id: str, home: str) -> None:
        elsewhere = (workers.c.worker_id == worker_id) & (workers.c.home != home)
        await self._write(update(workers).where(elsewhere).values(home=home))

    async def workers_with_live_models(self) -> Sequence[Worker]:
        """Return the workers with accepted or bound models."""
        living = select(models.c.worker_id).where(models.c.state.in_(("accepted", "bound")))
        query = select_records(workers, Worker).where(workers.c.worker_id.in_(living))
        return await self._read_all(Worker, query.order_by(workers.c.worker_id))


def unseen_worker(worker_id: str) -> dict[str, Any]:
    return values(Worker(worker_id=worker_id, epoch=0, instance_id="", event_cursor=0))
