"""Copies of checkpoints, one's own and those of other tenants that one may read: each in a run of its own."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from dataclasses import replace
from datetime import timedelta

from tinsmith_server.errors import CheckpointRootUnavailable, NotFound, Unprocessable
from tinsmith_server.logs import get_logger
from tinsmith_server.services.accounts.holdings import Checkpointed
from tinsmith_server.services.accounts.turns import Turns
from tinsmith_server.services.checkpoints.ended_runs import add_ended_run
from tinsmith_server.services.checkpoints.files import CheckpointFiles
from tinsmith_server.services.checkpoints.lookup import CheckpointLookup, CheckpointRefused
from tinsmith_server.store.base import Store
from tinsmith_server.store.records import Checkpoint, Clock, utc_now
from tinsmith_server.wire.ids import KIND_OF_TYPE, TinkerPath, model_id_of
from tinsmith_server.wire.requests import CopyWeightsRequest

log = get_logger(__name__)

TAG = "copied"


class Copies:
    """The same request twice, by its idempotency key, makes one copy."""

    def __init__(
        self,
        store: Store,
        files: CheckpointFiles,
        lookup: CheckpointLookup,
        checkpoints: Checkpointed,
        clock: Clock = utc_now,
    ) -> None:
        self._store = store
        self._files = files
        self._lookup = lookup
        self._checkpoints = checkpoints
        self._clock = clock
        # Of files, in threads that everybody's bodies are read in.
        self._copying = Turns()

    async def copy(
        self, tenant: str, request: CopyWeightsRequest, access_token: str | None, idempotency_key: str | None
    ) -> str:
        """The copy's path; its time ends by itself only where the request says so.

        Raises NotFound for what this tenant cannot read, with the token or without, and Unprocessable where it may not
        hold more.
        """
        session_id = _session_id(tenant, idempotency_key)
        try:
            source = await self._lookup.readable(tenant, request.source_path, access_token=access_token)
        except CheckpointRefused as error:
            raise NotFound(str(error)) from error
        copy = self._copy_of(source, tenant, session_id, request.ttl_seconds)
        async with self._copying.taken(tenant):
            await self._make(source, copy, session_id, request)
        return str(_path(copy))

    async def _make(self, source: Checkpoint, copy: Checkpoint, session_id: str, request: CopyWeightsRequest) -> None:
        """Unless it is there. What a tenant holds is asked in its turn: of many that wait each would pass before."""
        if await self._is_there(copy):
            return
        if (refusal := await self._checkpoints.refusal(copy.tenant)) is not None:
            raise Unprocessable(refusal)
        await self._copy_files(source, copy)
        project_id = request.destination_project_id
        await add_ended_run(self._store, session_id, copy, tag=TAG, event="checkpoint_copied", project_id=project_id)
        if not await self._is_there(copy):  # the same request had made one, which was deleted and does not come back
            await asyncio.to_thread(self._files.remove, copy.directory)
            raise NotFound(f"{_path(copy)} was deleted; ask for another copy by a request of its own")
        log.info("checkpoint copied", model_id=copy.run_id, tenant=copy.tenant, source=request.source_path)

    async def _is_there(self, copy: Checkpoint) -> bool:
        return await self._store.get_checkpoint(copy.run_id, copy.type, copy.name) is not None

    def _copy_of(self, source: Checkpoint, tenant: str, session_id: str, ttl_seconds: int | None) -> Checkpoint:
        now = self._clock()
        run_id = model_id_of(session_id, 0)
        return replace(
            source,
            run_id=run_id,
            tenant=tenant,
            directory=f"{KIND_OF_TYPE[source.type]}/{run_id.replace(':', '.')}/0-0",
            epoch=0,
            event_id=0,
            seq_id=0,
            created_at=now,
            expires_at=None if ttl_seconds is None else now + timedelta(seconds=ttl_seconds),
            public=False,
        )

    async def _copy_files(self, source: Checkpoint, copy: Checkpoint) -> None:
        try:
            await asyncio.to_thread(self._files.copy, source.directory, copy.directory)
        except (CheckpointRootUnavailable, FileNotFoundError) as error:
            await asyncio.to_thread(self._files.remove, copy.directory)
            if isinstance(error, FileNotFoundError):
                raise NotFound(f"{_path(source)} was deleted while it was copied") from error
            raise


def _session_id(tenant: str, idempotency_key: str | None) -> str:
    """One that a repeated request finds again, and nobody else can name."""
    if idempotency_key is None:
        return f"sess-{uuid.uuid4().hex}"
    return f"sess-{hashlib.sha256(f'copy {tenant} {idempotency_key}'.encode()).hexdigest()[:32]}"


def _path(checkpoint: Checkpoint) -> TinkerPath:
    return TinkerPath(checkpoint.run_id, KIND_OF_TYPE[checkpoint.type], checkpoint.name)
