"""Imports of adapters that were trained elsewhere.

A client starts an upload, sends each file, and finishes the upload as a checkpoint.

The upload's ID is signed and contains the request, so any replica can continue. A worker of the base model checks the
files and writes the checkpoint. The checkpoint belongs to a new training run, which has already ended.
"""

from __future__ import annotations

import asyncio
import posixpath
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import NotFound, Unprocessable, WorkerUnavailable
from tinsmith_server.fleet.base import Fleet, WorkerHandle
from tinsmith_server.logs import get_logger
from tinsmith_server.services.accounts.quotas import CheckpointQuota
from tinsmith_server.services.checkpoints.download_links import sign, verify
from tinsmith_server.services.checkpoints.files import UploadFiles
from tinsmith_server.services.checkpoints.retention import Retention, add_ended_run, ended_session
from tinsmith_server.services.training.model_creation import InvalidModelRequest, check_rank, find_served
from tinsmith_server.settings import Settings
from tinsmith_server.store.records import Checkpoint, Clock, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import TinkerPath
from tinsmith_server.wire.requests import UploadStartRequest

log = get_logger(__name__)

SECRET_NAME = "upload-urls"
UPLOAD_PATH = "/api/v1/uploads"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MOST_CONFIG_BYTES = 2**20
NAME = "imported"
CONNECT_SECONDS = 25.0
WRITERS = 2
"""The number of parts that are written at the same time.

The number is small, because a small number of threads reads the bodies of all requests.
"""
OVER = "you have no such upload, or it has expired; start another one"


@dataclass(frozen=True, slots=True)
class StartedUpload:
    """The URLs to which the files are sent. A PUT to an upload URL needs no key."""

    upload_id: str
    urls: dict[str, str]
    expires: datetime


@dataclass(frozen=True, slots=True)
class Upload:
    """The content of an upload's ID."""

    tenant: str
    base_model: str
    lora: dict[str, Any]
    project_id: str | None
    directory: str
    session_id: str

    @property
    def run_id(self) -> str:
        return f"{self.session_id}:train:0"

    @property
    def path(self) -> TinkerPath:
        return TinkerPath(self.run_id, "external_weights", NAME)

    @property
    def folder(self) -> str:
        """The folder in which a worker writes this run's checkpoint."""
        return f"external_weights/{self.run_id.replace(':', '.')}"


class AdapterImports:
    """Imports of adapters. If an upload is finished twice, only one checkpoint is made."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        files: UploadFiles,
        retention: Retention,
        checkpoints: CheckpointQuota,
        settings: Settings,
        clock: Clock = utc_now,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._files = files
        self._retention = retention
        self._checkpoints = checkpoints
        self._ttl = timedelta(seconds=settings.external_url_seconds)
        self._most = settings.uploads_per_tenant
        self._most_bytes = settings.max_upload_bytes
        self._clock = clock
        self._arriving: set[tuple[str, str]] = set()
        self._writing = asyncio.Semaphore(WRITERS)

    async def start(self, tenant: str, request: UploadStartRequest, base_url: str) -> StartedUpload:
        """Start an upload.

        Raises Unprocessable for a base model that cannot be trained here, and for a quota that is used up.
        """
        try:
            check_rank(find_served(self._fleet, request.base_model), request.lora_config.rank)
        except InvalidModelRequest as error:
            raise Unprocessable(str(error)) from error
        if (refusal := await self._checkpoints.refusal(tenant)) is not None:
            raise Unprocessable(refusal)
        expires = self._clock() + self._ttl
        claims = [
            tenant,
            request.base_model,
            request.lora_config.model_dump(exclude_none=True),
            request.destination_project_id,
            self._files.new_directory(tenant, expires),
            f"sess-{uuid.uuid4().hex}",
        ]
        upload_id = sign(await self._secret(), claims, expires)
        prefix = f"{base_url.rstrip('/')}{UPLOAD_PATH}/{upload_id}"
        return StartedUpload(upload_id, {name: f"{prefix}/{name}" for name in (CONFIG_FILE, WEIGHTS_FILE)}, expires)

    async def upload_of(self, upload_id: str) -> Upload:
        """Return the upload with this ID.

        Raises NotFound for an ID that this server did not issue, and for an expired ID.
        """
        claims = verify(await self._secret(), upload_id, self._clock())
        if claims is None:
            raise NotFound(OVER)
        return Upload(*claims)

    def limit_of(self, name: str) -> int:
        """Return the size limit of a file in bytes.

        Raises NotFound for a name that is not the name of an adapter's file.
        """
        limits = {CONFIG_FILE: min(MOST_CONFIG_BYTES, self._most_bytes), WEIGHTS_FILE: self._most_bytes}
        if name not in limits:
            raise NotFound(f"an adapter consists of {CONFIG_FILE} and {WEIGHTS_FILE}, not of {name[:100]!r}")
        return limits[name]

    async def receive(self, upload: Upload, name: str, parts: AsyncIterator[bytes]) -> None:
        """Receive one file. The file replaces an earlier file with the same name.

        Raises Unprocessable, NotFound if the upload has ended in the meantime, and the errors of `parts`.
        """
        arriving = upload.directory, name
        if arriving in self._arriving:
            raise Unprocessable(f"{name} of this upload is being sent already; wait for it, or start another upload")
        self._arriving.add(arriving)
        try:
            await self._receive(upload, name, parts)
        except FileNotFoundError as error:
            raise NotFound(OVER) from error
        finally:
            self._arriving.discard(arriving)

    async def _receive(self, upload: Upload, name: str, parts: AsyncIterator[bytes]) -> None:
        known = await asyncio.to_thread(self._files.others_of, upload.tenant, upload.directory)
        area = posixpath.dirname(upload.directory)
        # The uploads whose first file is arriving. A bucket shows a file only at the end of its upload.
        begun = {directory for directory, _ in self._arriving if posixpath.dirname(directory) == area}
        others = len((known | begun) - {upload.directory})
        if others >= self._most:
            raise Unprocessable(
                f"{others} of your uploads are open, and the limit is {self._most} (setting uploads_per_tenant); "
                "finish them, or wait until they expire"
            )
        file = await asyncio.to_thread(self._files.open, upload.directory, name)
        try:
            async for part in parts:
                async with self._writing:
                    await asyncio.to_thread(file.write, part)
            async with self._writing:
                await asyncio.to_thread(file.finish)
        except BaseException:
            await asyncio.to_thread(file.give_up)
            raise

    async def finish(self, tenant: str, upload_id: str) -> str:
        """Finish an upload, and return the path of the checkpoint.

        Raises NotFound for another tenant's upload, Unprocessable if the files are not an adapter of the base model,
        and WorkerUnavailable while no worker can check the files.
        """
        upload = await self.upload_of(upload_id)
        if upload.tenant != tenant:
            raise NotFound(OVER)
        if await self._found(upload) is None:
            await self._import(upload)
        await asyncio.to_thread(self._files.remove, upload.directory)
        return str(upload.path)

    async def sweep(self) -> None:
        """Remove the files of expired uploads."""
        await asyncio.to_thread(self._files.sweep, self._clock())

    async def _import(self, upload: Upload) -> None:
        if (refusal := await self._checkpoints.refusal(upload.tenant)) is not None:
            raise Unprocessable(refusal)
        handle = await self._worker(upload)
        worker = await handle.connection(CONNECT_SECONDS)
        await self._retention.reserve(upload.folder)
        lora = worker_pb2.LoraConfig(**upload.lora)
        request = worker_pb2.ImportAdapterRequest(directory=upload.directory, model_id=upload.run_id, lora=lora)
        try:
            made = await worker.import_adapter(request)
        except Unprocessable:
            await self._give_up_files(upload)
            raise
        await self._record(upload, _checkpoint(upload, made, self._clock()), handle.worker_id)
        found = await self._found(upload)
        if found is None:
            await self._retention.remove_files(upload.folder)
            await asyncio.to_thread(self._files.remove, upload.directory)
            raise NotFound(f"{upload.path} was deleted; start another upload to import the adapter again")
        if found.directory != made.directory:  # another request has finished the upload with other files
            await self._retention.remove_files(made.directory)
        await self._store.remove_garbage(upload.folder)
        log.info("adapter imported", model_id=upload.run_id, tenant=upload.tenant, base_model=upload.base_model)

    async def _give_up_files(self, upload: Upload) -> None:
        """Remove the files that were refused, because they use the tenant's quota of uploads.

        Other files may be sent to the same URLs.
        """
        if all(directory != upload.directory for directory, _ in self._arriving):
            await asyncio.to_thread(self._files.remove, upload.directory)

    async def _record(self, upload: Upload, checkpoint: Checkpoint, worker_id: str) -> None:
        session = ended_session(
            upload.session_id, upload.tenant, checkpoint.created_at, tag=NAME, project_id=upload.project_id
        )
        await self._store.create_session(session, None)
        await add_ended_run(
            self._store, session.session_id, checkpoint, event="checkpoint_imported", worker_id=worker_id
        )

    async def _found(self, upload: Upload) -> Checkpoint | None:
        return await self._store.get_checkpoint(upload.run_id, "external", NAME)

    async def _worker(self, upload: Upload) -> WorkerHandle:
        """Return a worker that runs, or a worker that takes models of this base model."""
        rank = int(upload.lora["rank"])
        trainers = self._fleet.trainers(upload.base_model, rank)
        if trainers:
            return next((handle for handle in trainers if handle.running()), trainers[0])
        raise WorkerUnavailable(await self._fleet.provide(upload.base_model, rank=rank))

    async def _secret(self) -> bytes:
        return await self._store.secret(SECRET_NAME)


def _checkpoint(upload: Upload, made: worker_pb2.ImportAdapterReply, now: datetime) -> Checkpoint:
    return Checkpoint(
        run_id=upload.run_id,
        type="external",
        name=NAME,
        tenant=upload.tenant,
        base_model=upload.base_model,
        directory=made.directory,
        manifest_digest=made.manifest_digest,
        size_bytes=made.size_bytes,
        epoch=0,
        event_id=0,
        seq_id=0,
        lora_rank=made.lora.rank,
        lora_alpha=made.lora.alpha,
        train_attn=made.lora.train_attn,
        train_mlp=made.lora.train_mlp,
        train_unembed=made.lora.train_unembed,
        created_at=now,
    )
