"""Sampling sessions and samples."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import (
    Gone,
    ModelUnloadable,
    NotFound,
    TooManySamples,
    Unprocessable,
    WorkerUnavailable,
)
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.logs import bind_ids
from tinsmith_server.services.clock import Clock, utc_now
from tinsmith_server.services.lookup import CheckpointLookup, CheckpointRefused
from tinsmith_server.services.samples import sample_request
from tinsmith_server.services.sessions import Sessions
from tinsmith_server.store.base import Store
from tinsmith_server.store.records import Checkpoint, SamplingSession
from tinsmith_server.wire.ids import SampleId, is_sample_number, sampling_session_id_of
from tinsmith_server.wire.requests import CreateSamplingSessionRequest

# Sampling sessions never change, and a burst names the same one hundreds of times a second.
CACHED_SESSIONS = 4096
# Short: the SDK waits out a 503 here only for 300 s, but a 429 without limit.
CONNECT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Submission:
    """A sample and the ids of its sequences, in the order in which they will come."""

    sample: SampleId
    sequence_ids: tuple[str, ...]


class Sampling:
    """A sample's future lives in the worker's memory; its id is a function of what was submitted."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        sessions: Sessions,
        lookup: CheckpointLookup,
        clock: Clock = utc_now,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._sessions = sessions
        self._lookup = lookup
        self._clock = clock
        self._known: OrderedDict[str, SamplingSession] = OrderedDict()

    async def open(self, tenant: str, request: CreateSamplingSessionRequest) -> SamplingSession:
        """Raises NotFound for a checkpoint, Unprocessable for a base model that is not there."""
        await self._sessions.active(tenant, request.session_id)
        session = SamplingSession(
            sampling_session_id=sampling_session_id_of(request.session_id, request.sampling_session_seq_id),
            session_id=request.session_id,
            sampling_session_seq_id=request.sampling_session_seq_id,
            tenant=tenant,
            base_model=request.base_model or "",
            created_at=self._clock(),
        )
        if request.model_path is not None:
            session = await self._on_checkpoint(session, request.model_path)
        if self._fleet.model(session.base_model) is None:
            names = ", ".join(model.name for model in self._fleet.models)
            raise Unprocessable(f"this server does not serve the base model {session.base_model!r}; it serves {names}")
        return await self._store.add_sampling_session(session)

    async def _on_checkpoint(self, session: SamplingSession, path: str) -> SamplingSession:
        try:
            checkpoint = await self._lookup.readable(session.tenant, path, "sampler")
        except CheckpointRefused as error:
            raise NotFound(str(error)) from error
        return replace(
            session,
            base_model=checkpoint.base_model,
            model_path=path,
            checkpoint_directory=checkpoint.directory,
            manifest_digest=checkpoint.manifest_digest,
        )

    async def owned(self, tenant: str, sampling_session_id: str) -> SamplingSession:
        """Raises NotFound, also for another tenant's sampling session."""
        session = self._known.get(sampling_session_id) or await self._store.get_sampling_session(sampling_session_id)
        if session is None or session.tenant != tenant:
            raise NotFound(f"there is no sampling session {sampling_session_id}")
        self._known[sampling_session_id] = session
        self._known.move_to_end(sampling_session_id)
        if len(self._known) > CACHED_SESSIONS:
            self._known.popitem(last=False)
        bind_ids(session_id=session.session_id, sampling_session_id=sampling_session_id)
        return session

    async def submit(self, tenant: str, body: dict[str, Any]) -> Submission:
        """Raises TooManySamples, which the SDK waits out without limit; bad parameters fail the future."""
        session_id, seq_id = body.get("sampling_session_id"), body.get("seq_id")
        if not isinstance(session_id, str) or not isinstance(seq_id, int) or not is_sample_number(seq_id):
            raise Unprocessable("sampling_session_id and seq_id are needed to know which sample this is")
        session = await self.owned(tenant, session_id)
        await self._sessions.active(tenant, session.session_id)
        sample = SampleId(session_id, seq_id)
        request = sample_request(sample, body)
        if not request.HasField("rejection"):
            request.adapter.CopyFrom(await self._adapter(session))
        await self._start(self._worker_id(session), request)
        return Submission(sample, tuple(f"{sample}:{index}" for index in range(request.num_samples)))

    async def cancel(self, tenant: str, sample: SampleId) -> None:
        """A worker that is not there has no sample to stop."""
        session = await self.owned(tenant, sample.sampling_session_id)
        worker = self._fleet.worker(self._worker_id(session)).running()
        if worker is not None:
            await worker.cancel_sample(str(sample))

    async def worker_of(self, tenant: str, sampling_session_id: str) -> str:
        return self._worker_id(await self.owned(tenant, sampling_session_id))

    def _worker_id(self, session: SamplingSession) -> str:
        served = self._fleet.model(session.base_model)
        if served is None:
            raise WorkerUnavailable(f"this server was started without {session.base_model}; add it with --model")
        return served.worker_id

    async def _start(self, worker_id: str, request: worker_pb2.SampleRequest) -> None:
        handle = self._fleet.worker(worker_id)
        try:
            worker = await handle.connection(CONNECT_SECONDS)
            await worker.sample(request)
        except ModelUnloadable as error:
            # Final, so not the 5xx or 429 that a sample repeats without end.
            raise Unprocessable(str(error)) from error
        except WorkerUnavailable as error:
            raise TooManySamples(str(error)) from error

    async def _adapter(self, session: SamplingSession) -> worker_pb2.AdapterRef:
        """The weights to sample from. Raises Gone when they are no longer kept."""
        if session.model_path is None and session.model_id is None:
            return worker_pb2.AdapterRef()
        source = session
        if session.inflight and session.model_id is not None:
            source = await self._store.newest_inflight(session.model_id) or session
        checkpoint = await self._weights(source)
        if checkpoint is None or checkpoint.directory != source.checkpoint_directory:
            raise Gone(f"the weights of sampling session {session.sampling_session_id} are no longer kept")
        return worker_pb2.AdapterRef(directory=checkpoint.directory, manifest_digest=checkpoint.manifest_digest)

    async def _weights(self, session: SamplingSession) -> Checkpoint | None:
        if session.model_path is None:
            return await self._lookup.live(session.model_id or "", "ephemeral", session.sampling_session_id)
        try:
            return await self._lookup.readable(session.tenant, session.model_path, "sampler")
        except CheckpointRefused:
            return None
