"""The checkpoints of tenants: list, get, delete, publish, set an expiry, and describe."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeAlias, TypeVar

from tinsmith_server.errors import NotFound, Unprocessable
from tinsmith_server.services.accounts.audit import CheckpointEvent, entry
from tinsmith_server.services.checkpoints.lookup import CheckpointLookup, CheckpointRefused
from tinsmith_server.services.checkpoints.promotions import refuse_to_end
from tinsmith_server.services.checkpoints.retention import Retention
from tinsmith_server.services.rows import in_steps, owned_model
from tinsmith_server.store.records import Checkpoint, Clock, Page, PromotedPath, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import CheckpointType, TinkerPath

Types: TypeAlias = frozenset[CheckpointType]
R = TypeVar("R")


class Checkpoints:
    """The tenants' checkpoints. Only the owner can change a checkpoint. All tenants can read a public checkpoint."""

    def __init__(
        self,
        store: Store,
        lookup: CheckpointLookup,
        retention: Retention,
        clock: Clock = utc_now,
    ) -> None:
        self._store = store
        self._lookup = lookup
        self._retention = retention
        self._clock = clock

    async def of_run(self, tenant: str, run_id: str, types: Types) -> list[Checkpoint]:
        """Return the run's checkpoints of these types."""
        await owned_model(self._store, tenant, run_id)
        found = self._unexpired(await self._store.checkpoints_of_run(run_id))
        return [one for one in found if one.type in types]

    async def all(self, tenant: str, limit: int, offset: int, types: Types) -> Page[Checkpoint]:
        """Return a page of the tenant's checkpoints of these types."""
        page = await in_steps(partial(self._store.list_checkpoints, tenant, types=types), limit, offset)
        return Page(tuple(self._unexpired(page.rows)), page.total)

    async def readable(self, tenant: str, path: str) -> Checkpoint:
        """Return the checkpoint at a path. Raises NotFound with a reason."""
        try:
            return await self._lookup.readable(tenant, path)
        except CheckpointRefused as error:
            raise NotFound(str(error)) from error

    async def delete(self, tenant: str, path: TinkerPath) -> None:
        """Delete a checkpoint. Raises Unprocessable if a promoted name points to the checkpoint."""
        checkpoint = await self._owned(tenant, path)
        extra_rows = (entry(checkpoint, "checkpoint_deleted", self._clock()),)
        promoted = PromotedPath(tenant, str(path))
        deleted = await self._unless_promoted(
            path, promoted, lambda: self._retention.forget(checkpoint, extra_rows, promoted)
        )
        if deleted is not None:
            await self._retention.remove_files(deleted.directory)

    async def publish(self, tenant: str, path: TinkerPath, public: bool) -> None:
        """Publish or unpublish a checkpoint.

        Raises Unprocessable if nothing would change, because after a 409 the SDK would retry for minutes.
        """
        checkpoint = await self._owned(tenant, path)
        if checkpoint.public is public:
            raise Unprocessable(f"{path} is {'already' if public else 'not'} public")
        event: CheckpointEvent = "checkpoint_published" if public else "checkpoint_unpublished"
        extra_rows = (entry(checkpoint, event, self._clock()),)
        await self._store.set_checkpoint_public(path.run_id, path.type, path.name, public, extra_rows)

    async def set_ttl(self, tenant: str, path: TinkerPath, ttl_seconds: int | None) -> None:
        """Set the expiry of a checkpoint. Raises Unprocessable if a promoted name points to the checkpoint."""
        checkpoint, now = await self._owned(tenant, path), self._clock()
        named, extra_rows = (
            (path.run_id, path.type, path.name),
            (entry(checkpoint, "checkpoint_ttl_set", now, ttl_seconds=ttl_seconds),),
        )
        if ttl_seconds is None:
            await self._store.set_checkpoint_expiry(*named, None, extra_rows)
            return
        end, promoted = now + timedelta(seconds=ttl_seconds), PromotedPath(tenant, str(path))
        await self._unless_promoted(
            path, promoted, lambda: self._store.set_checkpoint_expiry(*named, end, extra_rows, promoted)
        )

    async def _unless_promoted(self, path: TinkerPath, promoted: PromotedPath, change: Callable[[], Awaitable[R]]) -> R:
        """Make a change, unless a promoted name points to the checkpoint.

        The store checks the names in the same transaction as the change. Without a common transaction, a name could be
        promoted in between, and would then point to a missing checkpoint. Returns the result of the change, even if the
        checkpoint no longer exists. Raises Unprocessable with the promoted names.
        """
        while not (changed := await change()):
            await refuse_to_end(self._store, promoted)
            if await self._store.get_checkpoint(path.run_id, path.type, path.name) is None:
                break
        return changed

    async def _owned(self, tenant: str, path: TinkerPath) -> Checkpoint:
        checkpoint = await self.readable(tenant, str(path))
        if checkpoint.tenant != tenant:
            raise NotFound(f"you have no checkpoint {path}")
        return checkpoint

    def _unexpired(self, checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
        now = self._clock()
        return [one for one in checkpoints if one.expires_at is None or one.expires_at > now]
