"""Workers: the epoch that fences older servers out, and how far a worker's events are drained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import bindparam, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.database import KEY
from tinsmith_server.store.queries.base import (
    Queries,
    changes_rows,
    fetch_made,
    insert_unless_there,
    select_records,
    values,
)
from tinsmith_server.store.records import Worker
from tinsmith_server.store.tables import models, workers

_EPOCH = select(workers.c.epoch).where(workers.c.worker_id == bindparam(KEY))
_BY_ID = select_records(workers, Worker).where(workers.c.worker_id == bindparam("worker_id"))
_ADVANCE = (
    update(workers)
    .where(workers.c.worker_id == bindparam("worker"), workers.c.event_cursor < bindparam("event"))
    .values(event_cursor=bindparam("event"))
)


class WorkerQueries(Queries):
    """The part of `Store` about workers."""

    async def epoch_of(self, worker_id: str) -> int:
        """The epoch alone, which every acknowledgement asks for; 0 for a worker that was never seen."""
        return await self._database.look_up_value(_EPOCH, worker_id) or 0

    async def get_worker(self, worker_id: str) -> Worker:
        """Makes the row at first sight: epoch 0, no instance, cursor 0."""
        unseen = unseen_worker(worker_id)
        known = await self._look_up(Worker, _BY_ID, unseen)
        return known or await self._insert_or_find(Worker, workers, unseen, _BY_ID, unseen)

    async def raise_epoch(self, worker_id: str, expected_epoch: int, instance_id: str) -> Worker | None:
        """Compare-and-swap to expected_epoch + 1; None when another replica was faster."""
        unchanged = (workers.c.worker_id == worker_id) & (workers.c.epoch == expected_epoch)
        raised = update(workers).where(unchanged).values(epoch=expected_epoch + 1, instance_id=instance_id)

        async def compare_and_swap(connection: AsyncConnection) -> Worker | None:
            await insert_unless_there(connection, workers, unseen_worker(worker_id))
            if not await changes_rows(connection, raised):
                return None
            return await fetch_made(connection, Worker, _BY_ID, {"worker_id": worker_id})

        return await self._database.write(compare_and_swap)

    async def advance_cursor(self, worker_id: str, event_id: int) -> None:
        """Never moves backwards."""
        await self._write(_ADVANCE, {"worker": worker_id, "event": event_id})

    async def note_home(self, worker_id: str, home: str) -> None:
        elsewhere = (workers.c.worker_id == worker_id) & (workers.c.home != home)
        await self._write(update(workers).where(elsewhere).values(home=home))

    async def workers_with_live_models(self) -> Sequence[Worker]:
        """Those at which an accepted or bound model is placed."""
        living = select(models.c.worker_id).where(models.c.state.in_(("accepted", "bound")))
        query = select_records(workers, Worker).where(workers.c.worker_id.in_(living))
        return await self._read_all(Worker, query.order_by(workers.c.worker_id))


def unseen_worker(worker_id: str) -> dict[str, Any]:
    return values(Worker(worker_id=worker_id, epoch=0, instance_id="", event_cursor=0))
