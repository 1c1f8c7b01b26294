"""Retention of checkpoints.

A record is removed before its files, so a crash may leave files without a record, but never a record without files.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

from tinsmith_server.errors import CheckpointRootUnavailable
from tinsmith_server.logs import get_logger
from tinsmith_server.services.accounts.audit import CheckpointEvent, entry, of_new
from tinsmith_server.services.accounts.limits import Limits
from tinsmith_server.services.checkpoints.files import CheckpointFiles
from tinsmith_server.settings import Settings
from tinsmith_server.store.records import Checkpoint, Clock, ExtraRows, Model, PromotedPath, Session, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import KIND_OF_TYPE, TinkerPath

log = get_logger(__name__)

# Tombstones are kept this long for readers of a deleted checkpoint's state. The store itself prevents that an event
# restores a checkpoint.
TOMBSTONE_RETENTION = timedelta(days=7)
# A reservation lasts longer than any copy or import, and longer than the difference between the servers' clocks.
RESERVED_FOR = timedelta(days=1)
# Promoted names protect at most a hundred checkpoints of a tenant, so each round also reaches other checkpoints.
SURPLUS_AT_ONCE = 1000


class Retention:
    """The removal of expired checkpoints, of unnamed weights of ended sessions, and of files without a record."""

    def __init__(self, store: Store, files: CheckpointFiles, settings: Settings, clock: Clock = utc_now) -> None:
        self._store = store
        self._files = files
        self._ephemeral_retention = timedelta(seconds=settings.ephemeral_retention_seconds)
        self._ephemeral_per_tenant = settings.ephemeral_per_tenant
        self._clock = clock

    async def sweep(self) -> None:
        now = self._clock()
        for one in await self._store.expired_checkpoints(now):
            # The owner may have extended the expiry in between, or saved again under the same name.
            self._note(await self._store.delete_expired_checkpoint(one.run_id, one.type, one.name, now))
        for checkpoint in await self._store.ephemeral_of_finished_sessions(now - self._ephemeral_retention):
            await self.forget(checkpoint)
        await self.collect_garbage()
        await self._store.delete_old_tombstones(now - TOMBSTONE_RETENTION)

    async def enforce_ephemeral_cap(self, tenant: str) -> None:
        """Remove the tenant's oldest unnamed weights if there are more than the limit.

        Sampling from removed weights answers 410. The newest weights of each model are kept, because a program that
        saves often must not remove the current weights of another program.
        """
        kept = await self._store.ephemeral_checkpoints(tenant)
        newest = {checkpoint.run_id: checkpoint for checkpoint in kept}
        older = [checkpoint for checkpoint in kept if checkpoint is not newest[checkpoint.run_id]]
        for checkpoint in older[: max(0, len(kept) - self._ephemeral_per_tenant)]:
            await self.forget(checkpoint)

    async def forget(
        self,
        checkpoint: Checkpoint,
        extra_rows: ExtraRows = (),
        unless_promoted: PromotedPath | None = None,
        *,
        unless_public: bool = False,
    ) -> Checkpoint | None:
        """Delete the record of a checkpoint. The next collection removes the checkpoint's files.

        Returns None if the record no longer exists, if a promoted name points to the checkpoint, or if it is public
        and `unless_public` is set.
        """
        deleted = await self._store.delete_checkpoint(
            checkpoint.run_id,
            checkpoint.type,
            checkpoint.name,
            self._clock(),
            extra_rows,
            unless_promoted,
            unless_public=unless_public,
        )
        self._note(deleted)
        return deleted

    @staticmethod
    def _note(deleted: Checkpoint | None) -> None:
        if deleted is not None:
            log.info("checkpoint deleted", model_id=deleted.run_id, type=deleted.type, name=deleted.name)

    async def reserve(self, directory: str) -> None:
        """Reserve a directory. Call this before the directory is written.

        If the server then crashes, the directory is removed within a day.
        """
        await self._store.reserve_directory(directory, self._clock() + RESERVED_FOR)

    async def collect_garbage(self) -> None:
        for directory in await self._store.list_garbage(self._clock()):
            await self.remove_files(directory)

    async def remove_files(self, directory: str) -> None:
        """Remove the files of a checkpoint that has no record any more.

        If the checkpoint root refuses the removal, the next collection tries again.
        """
        try:
            await asyncio.to_thread(self._files.remove, directory)
        except (CheckpointRootUnavailable, FileNotFoundError) as error:
            log.warning("files cannot be removed", directory=directory, error=str(error))
        else:
            await self._store.remove_garbage(directory)


class KeptCheckpoints:
    """The limit `checkpoints_kept` of a tenant: how many checkpoints of each kind a run keeps.

    The limit counts per kind, because programs save weights to resume from and weights to sample from under the same
    name. A public checkpoint and a checkpoint with a promoted name are counted, but never deleted, because other users
    depend on them.
    """

    def __init__(self, store: Store, retention: Retention, limits: Limits, clock: Clock = utc_now) -> None:
        self._store = store
        self._retention = retention
        self._limits = limits
        self._clock = clock

    async def sweep(self) -> None:
        """Delete what is over the limits. The next collection of garbage removes the files."""
        for limits in await self._limits.with_checkpoints_kept():
            assert limits.checkpoints_kept is not None
            surplus = await self._store.surplus_checkpoints(limits.tenant, limits.checkpoints_kept, SURPLUS_AT_ONCE)
            for checkpoint in surplus:
                await self._delete(checkpoint, limits.checkpoints_kept)

    async def _delete(self, checkpoint: Checkpoint, kept: int) -> None:
        """Delete the checkpoint, unless it has been published or promoted in the meantime."""
        path = TinkerPath(checkpoint.run_id, KIND_OF_TYPE[checkpoint.type], checkpoint.name)
        deleted_by_limit = entry(checkpoint, "checkpoint_deleted", self._clock(), checkpoints_kept=kept)
        await self._retention.forget(
            checkpoint, (deleted_by_limit,), PromotedPath(checkpoint.tenant, str(path)), unless_public=True
        )


def ended_session(
    session_id: str,
    tenant: str,
    now: datetime,
    *,
    tag: str,
    project_id: str | None,
    request_digest: str | None = None,
) -> Session:
    """Return a new session that is already finished."""
    return Session(
        session_id=session_id,
        tenant=tenant,
        created_at=now,
        last_heartbeat_at=now,
        tags=(tag,),
        project_id=project_id,
        finished_at=now,
        finish_type="success",
        request_digest=request_digest,
    )


async def add_ended_run(
    store: Store, session_id: str, checkpoint: Checkpoint, *, event: CheckpointEvent, worker_id: str = ""
) -> None:
    """Add a released model and its checkpoint to a session that is in the store.

    Rows that exist already are not changed.
    """
    await store.add_model(_model(session_id, checkpoint, worker_id))
    await store.put_checkpoint(checkpoint, of_new(checkpoint, event))


def _model(session_id: str, checkpoint: Checkpoint, worker_id: str) -> Model:
    return Model(
        model_id=checkpoint.run_id,
        session_id=session_id,
        model_seq_id=0,
        tenant=checkpoint.tenant,
        base_model=checkpoint.base_model,
        worker_id=worker_id,
        state="released",
        create_kind="load",
        create_payload=b"",
        lora_rank=checkpoint.lora_rank,
        lora_alpha=checkpoint.lora_alpha,
        train_attn=checkpoint.train_attn,
        train_mlp=checkpoint.train_mlp,
        train_unembed=checkpoint.train_unembed,
        optimizer={"type": "adamw"},
        user_metadata=None,
        created_at=checkpoint.created_at,
        last_request_at=checkpoint.created_at,
    )
