"""Queries about deferred operations."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import bindparam, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.database import KEY
from tinsmith_server.store.queries.base import Queries, insert_unless_there, select_records, values
from tinsmith_server.store.records import DeferredOperation, Model
from tinsmith_server.store.tables import deferred_operations, models

_ANY_OF_MODEL = select(deferred_operations.c.model_id).where(deferred_operations.c.model_id == bindparam(KEY)).limit(1)
_FIRST_OF_MODEL = (
    select_records(deferred_operations, DeferredOperation)
    .where(deferred_operations.c.model_id == bindparam("model"))
    .order_by(deferred_operations.c.seq_id)
    .limit(1)
)
_BYTES_OF_TENANT = select(func.sum(deferred_operations.c.size_bytes)).where(
    deferred_operations.c.tenant == bindparam("tenant")
)


class DeferredQueries(Queries):
    """The queries about operations that wait for their model's worker."""

    async def defer_operation(self, operation: DeferredOperation, most_bytes: int) -> bool:
        """Insert the operation, unless it is there.

        Returns False if the tenant's deferred operations would have more than `most_bytes` in total.
        """

        async def defer(connection: AsyncConnection) -> bool:
            held = int(await connection.scalar(_BYTES_OF_TENANT, {"tenant": operation.tenant}) or 0)
            if held + operation.size_bytes > most_bytes:
                return False
            await insert_unless_there(connection, deferred_operations, values(operation))
            return True

        return await self._database.write(defer)

    async def has_deferred_operations(self, model_id: str) -> bool:
        """Return whether operations of the model are deferred. Every submission asks this."""
        return await self._database.look_up_value(_ANY_OF_MODEL, model_id) is not None

    async def is_deferred(self, model_id: str, seq_id: int) -> bool:
        row = (deferred_operations.c.model_id == model_id) & (deferred_operations.c.seq_id == seq_id)
        return await self._count(select(func.count()).select_from(deferred_operations).where(row)) > 0

    async def first_deferred_operation(self, model_id: str) -> DeferredOperation | None:
        return await self._look_up(DeferredOperation, _FIRST_OF_MODEL, {"model": model_id})

    async def delete_deferred_operation(self, model_id: str, seq_id: int) -> None:
        row = (deferred_operations.c.model_id == model_id) & (deferred_operations.c.seq_id == seq_id)
        await self._write(delete(deferred_operations).where(row))

    async def models_with_deferred_operations(self) -> Sequence[Model]:
        waiting = models.c.model_id.in_(select(deferred_operations.c.model_id))
        return await self._read_all(Model, select_records(models, Model).where(waiting).order_by(models.c.model_id))
