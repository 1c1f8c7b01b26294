"""Copies of the tenant's own checkpoints, and of readable checkpoints of other tenants. Each copy has its own run."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from datetime import datetime, timedelta

from tinsmith_server.errors import NotFound, Unprocessable
from tinsmith_server.logs import get_logger
from tinsmith_server.services.accounts.concurrency import FairLock
from tinsmith_server.services.accounts.quotas import CheckpointQuota
from tinsmith_server.services.accounts.sessions import KeyedRequest, check_repeats, keyed_request
from tinsmith_server.services.checkpoints.files import MANIFEST, CheckpointFiles
from tinsmith_server.services.checkpoints.lookup import CheckpointLookup, CheckpointRefused
from tinsmith_server.services.checkpoints.manifests import saved_files
from tinsmith_server.services.checkpoints.retention import Retention, add_ended_run, ended_session
from tinsmith_server.store.records import Checkpoint, Clock, Session, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import KIND_OF_TYPE, PathKind, TinkerPath, model_id_of, parse_tinker_path
from tinsmith_server.wire.requests import CopyWeightsRequest

log = get_logger(__name__)

TAG = "copied"


class Copies:
    """Copies of checkpoints. An idempotency key makes only one copy, and another request with the same key is refused.

    Each attempt writes to a directory with a random name, so that no text from a tenant becomes a path. If several
    attempts make the same copy, the store keeps the first record. The other attempts remove their own directories.
    Attempts at the same copy may run at different servers.
    """

    def __init__(
        self,
        store: Store,
        files: CheckpointFiles,
        lookup: CheckpointLookup,
        retention: Retention,
        checkpoints: CheckpointQuota,
        clock: Clock = utc_now,
    ) -> None:
        self._store = store
        self._files = files
        self._lookup = lookup
        self._retention = retention
        self._checkpoints = checkpoints
        self._clock = clock
        # The threads that copy files are also needed to read request bodies.
        self._copying = FairLock()

    async def copy(
        self, tenant: str, request: CopyWeightsRequest, access_token: str | None, idempotency_key: str | None
    ) -> str:
        """Copy a checkpoint, and return the path of the copy. The copy expires only if the request says so.

        Raises NotFound for a checkpoint that this tenant cannot read, even with the token. Raises CheckpointDamaged for
        files that differ from the manifest. Raises Unprocessable if the quota is used up, or if the idempotency key was
        used with another request.
        """
        keyed = keyed_request(idempotency_key, request.model_dump(mode="json"))
        if (path := await self._made_before(tenant, request, keyed)) is not None:
            return path
        try:
            source = await self._lookup.readable(tenant, request.source_path, access_token=access_token)
        except CheckpointRefused as error:
            raise NotFound(str(error)) from error
        async with self._copying.held(tenant):
            return await self._make(tenant, source, request, keyed)

    async def _make(
        self, tenant: str, source: Checkpoint, request: CopyWeightsRequest, keyed: KeyedRequest | None
    ) -> str:
        """Check the quota and the idempotency key, and make the copy, while holding the tenant's lock.

        Without the lock, concurrent copies could all pass the check of the quota.
        """
        if (path := await self._made_before(tenant, request, keyed)) is not None:
            return path
        if (refusal := await self._checkpoints.refusal(tenant)) is not None:
            raise Unprocessable(refusal)
        directory = new_directory(KIND_OF_TYPE[source.type])
        await self._retention.reserve(directory)
        try:
            await self._copy_files(source, directory)
        except Exception:
            await self._retention.remove_files(directory)
            raise
        # After another error the record may still exist, for example if the store stops answering after its commit. The
        # reservation ends after a day. Then the files are removed unless a record names them.
        try:
            copy = await self._record(tenant, source, directory, request, keyed)
        except (NotFound, Unprocessable):
            await self._retention.remove_files(directory)
            raise
        if copy.directory != directory:  # another server has completed the same request first
            await self._retention.remove_files(directory)
        log.info("checkpoint copied", model_id=copy.run_id, tenant=tenant, source=request.source_path)
        return str(_path(copy))

    async def _made_before(self, tenant: str, request: CopyWeightsRequest, keyed: KeyedRequest | None) -> str | None:
        if keyed is None or (session := await self._store.session_of_key(tenant, keyed.key)) is None:
            return None
        check_repeats(session, keyed)
        source = parse_tinker_path(request.source_path)
        made = await self._store.get_checkpoint(model_id_of(session.session_id, 0), source.type, source.name)
        return None if made is None else str(_path(made))

    async def _copy_files(self, source: Checkpoint, directory: str) -> None:
        """Copy the files that the manifest names, then the manifest.

        The contents are checked at each read, not here.
        """

        def copy() -> None:
            names = saved_files(self._files, source.directory, source.manifest_digest)
            self._files.copy(source.directory, directory, [*names, MANIFEST])

        try:
            await asyncio.to_thread(copy)
        except FileNotFoundError as error:
            raise NotFound(f"{_path(source)} was deleted while it was copied") from error

    async def _record(
        self,
        tenant: str,
        source: Checkpoint,
        directory: str,
        request: CopyWeightsRequest,
        keyed: KeyedRequest | None,
    ) -> Checkpoint:
        """Return the copy's record in the store.

        The record may belong to the copy that another server made for the same request.
        """
        now = self._clock()
        session = await self._store.create_session(
            _session(tenant, now, request, keyed), None if keyed is None else keyed.key
        )
        if keyed is not None:
            check_repeats(session, keyed)
        copy = _copy_of(source, tenant, model_id_of(session.session_id, 0), directory, now, request.ttl_seconds)
        await add_ended_run(self._store, session.session_id, copy, event="checkpoint_copied")
        standing = await self._store.get_checkpoint(copy.run_id, copy.type, copy.name)
        if standing is None:  # the copy of the same request was deleted, and is not restored
            raise NotFound(f"{_path(copy)} was deleted; request another copy with a new idempotency key")
        return standing


def new_directory(kind: PathKind) -> str:
    """Return a directory that no other attempt uses."""
    return f"{kind}/copies/{uuid.uuid4().hex}"


def _session(tenant: str, now: datetime, request: CopyWeightsRequest, keyed: KeyedRequest | None) -> Session:
    return ended_session(
        f"sess-{uuid.uuid4().hex}",
        tenant,
        now,
        tag=TAG,
        project_id=request.destination_project_id,
        request_digest=None if keyed is None else keyed.digest,
    )


def _copy_of(
    source: Checkpoint, tenant: str, run_id: str, directory: str, now: datetime, ttl_seconds: int | None
) -> Checkpoint:
    return replace(
        source,
        run_id=run_id,
        tenant=tenant,
        directory=directory,
        epoch=0,
        event_id=0,
        seq_id=0,
        created_at=now,
        expires_at=None if ttl_seconds is None else now + timedelta(seconds=ttl_seconds),
        public=False,
    )


def _path(checkpoint: Checkpoint) -> TinkerPath:
    return TinkerPath(checkpoint.run_id, KIND_OF_TYPE[checkpoint.type], checkpoint.name)
