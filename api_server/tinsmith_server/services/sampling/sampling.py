"""Sampling sessions and samples, and the wait for a missing model."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import Gone, NotFound, TooManySamples, Unprocessable
from tinsmith_server.fleet.base import Fleet, ServedModel
from tinsmith_server.fleet.names import NotServed, find_model, served_model, share_weights
from tinsmith_server.logs import bind_ids
from tinsmith_server.services.accounts.quotas import SamplesInFlight
from tinsmith_server.services.accounts.sessions import KeyedRequest, Sessions, keyed_request
from tinsmith_server.services.checkpoints.lookup import CheckpointLookup, CheckpointRefused
from tinsmith_server.services.checkpoints.promotions import Promotions
from tinsmith_server.services.failures import training_only
from tinsmith_server.services.rows import RowCache
from tinsmith_server.services.sampling.adapter_delivery import AdapterHints, save_of
from tinsmith_server.services.sampling.dispatch import Dispatch, Need
from tinsmith_server.services.sampling.sample_requests import PlainSample, SampleSubmission
from tinsmith_server.store.records import Checkpoint, Clock, SamplingSession, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import SampleId, drawn_sample_number, parse_tinker_path, sampling_session_id_of
from tinsmith_server.wire.plain_requests import CreateSamplingClientRequest
from tinsmith_server.wire.requests import CreateSamplingSessionRequest

K = TypeVar("K", bound=Hashable)

# Sampling sessions never change, and a burst of samples reads the same session hundreds of times a second.
CACHED_SESSIONS = 4096
# Each call checks whether the client's session is still open.
OF_SAMPLES_SECONDS = 3600.0
# A model is missing for a moment when its resource is created again, for example from another manifest.
AWAY_LIMIT = timedelta(seconds=300)


@dataclass(frozen=True, slots=True)
class Submission:
    """A sample, and the IDs of its sequences in the order of the answer."""

    sample: SampleId
    sequence_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampling session, and the worker that made its weights.

    The worker is empty for the weights of the base model.
    """

    session: SamplingSession
    worker_id: str


class Sampling:
    """The service for samples.

    The future of a sample is in the memory of its sampler; the future's ID names the sample and the sampler.
    """

    def __init__(
        self,
        *,
        store: Store,
        fleet: Fleet,
        sessions: Sessions,
        lookup: CheckpointLookup,
        promotions: Promotions,
        dispatch: Dispatch,
        hints: AdapterHints,
        in_flight: SamplesInFlight,
        clock: Clock = utc_now,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._sessions = sessions
        self._lookup = lookup
        self._promotions = promotions
        self._dispatch = dispatch
        self._hints = hints
        self._in_flight = in_flight
        self._clock = clock
        self._known: OrderedDict[str, Sampler] = OrderedDict()
        # The sampling sessions of plain samples, by tenant and source.
        self._of_samples: RowCache[tuple[str | None, ...], SamplingSession] = RowCache(OF_SAMPLES_SECONDS)
        # The missing models, by base model and the adapter's rank.
        self._away: MissingTracker[tuple[str, int]] = MissingTracker(AWAY_LIMIT, clock)

    async def open(self, tenant: str, request: CreateSamplingSessionRequest) -> SamplingSession:
        """Open a sampling session.

        Raises NotFound for an unknown checkpoint, and Unprocessable for a base model that is unknown or does not match.
        """
        await self._sessions.active(tenant, request.session_id)
        source = await self._source(tenant, request.base_model, request.model_path)
        return await self._add(source, request.session_id, request.sampling_session_seq_id)

    async def _source(self, tenant: str, base_model: str | None, model_path: str | None) -> SamplingSession:
        """Return a sampling session for the source. The new sampling session has no ID yet."""
        source = SamplingSession(
            sampling_session_id="",
            session_id="",
            sampling_session_seq_id=0,
            tenant=tenant,
            base_model=base_model or "",
            created_at=self._clock(),
        )
        if model_path is not None:
            source = await self._on_checkpoint(source, model_path)
        return replace(source, base_model=self._check_served(source.base_model).name)

    async def _add(self, source: SamplingSession, session_id: str, number: int) -> SamplingSession:
        name = sampling_session_id_of(session_id, number)
        return await self._store.add_sampling_session(
            replace(source, sampling_session_id=name, session_id=session_id, sampling_session_seq_id=number)
        )

    async def _on_checkpoint(self, session: SamplingSession, path: str) -> SamplingSession:
        try:
            checkpoint = await self._lookup.readable(session.tenant, path, "sampler")
        except CheckpointRefused as error:
            raise NotFound(str(error)) from error
        if session.base_model and not share_weights(self._fleet, session.base_model, checkpoint.base_model):
            raise Unprocessable(
                f"{path} is a checkpoint of {checkpoint.base_model}, and base_model is {session.base_model}; "
                f"name {checkpoint.base_model}, or leave base_model out"
            )
        model = await self._store.get_model(checkpoint.run_id)
        self._hints.announce(checkpoint, model.worker_id if model else "")
        return replace(
            session,
            base_model=checkpoint.base_model,
            model_path=path,
            checkpoint_directory=checkpoint.directory,
            manifest_digest=checkpoint.manifest_digest,
        )

    async def _on_promoted(self, session: SamplingSession, name: str) -> SamplingSession:
        path = await self._promotions.path_of(session.tenant, name)
        if path is None:
            raise NotFound(
                f"there is no model {name!r}: use a served base model, a tinker:// path, or a name that you have "
                "promoted"
            )
        try:
            return await self._on_checkpoint(session, path)
        except NotFound as error:
            raise NotFound(
                f"{name} refers to {path}, which is gone: promote another checkpoint, or roll back"
            ) from error

    async def owned(self, tenant: str, sampling_session_id: str) -> SamplingSession:
        """Return the sampling session.

        Raises NotFound for an unknown sampling session, and for another tenant's sampling session.
        """
        return (await self._sampler(tenant, sampling_session_id)).session

    async def join(self, tenant: str, sampling_session_id: str) -> int:
        """Return a number, from 1 on, that no other client of the sampling session has. Raises NotFound."""
        session = await self.owned(tenant, sampling_session_id)
        return await self._store.add_sampling_client(session.sampling_session_id)

    async def submit(self, tenant: str, submitted: SampleSubmission) -> Submission:
        """Submit a sample. Invalid parameters make the future fail.

        Raises TooManySamples, after which the SDK retries without a limit, and Unprocessable for a model that has not
        been served for some minutes.
        """
        sampler = await self._sampler(tenant, submitted.request.sampling_session_id)
        await self._sessions.active(tenant, sampler.session.session_id)
        return await self._submit(sampler, submitted)

    async def open_own(
        self, tenant: str, request: CreateSamplingClientRequest, key: str | None = None
    ) -> SamplingSession:
        """Open a sampling session in a new session. The same idempotency key returns the same sampling session.

        Raises the errors of `open`.
        """
        keyed = keyed_request(key, [request.base_model, request.model_path])
        return await self._open_own(await self._source(tenant, request.base_model, request.model_path), keyed)

    async def _open_own(self, source: SamplingSession, keyed: KeyedRequest | None) -> SamplingSession:
        session = await self._sessions.create_for_one(source.tenant, keyed)
        await self._sessions.active(source.tenant, session.session_id)
        return await self._add(source, session.session_id, 0)

    async def submit_plain(self, tenant: str, sample: PlainSample, key: str | None = None) -> Submission:
        """Submit a sample that has no number. The same idempotency key returns the same number.

        Raises the errors of `open` and `submit`.
        """
        sampling_session_id = sample.sampling_session_id
        if sampling_session_id is None:
            source = await self._source(tenant, sample.base_model, sample.model_path)
            sampling_session_id = await self._open_for_sample(source, keyed_request(key, sample.content()))
        sample.request.sampling_session_id = sampling_session_id
        return await self.submit(tenant, SampleSubmission(drawn_sample_number(key), sample.request))

    async def _open_for_sample(self, source: SamplingSession, keyed: KeyedRequest | None) -> str:
        """Return a sampling session for a sample without an SDK.

        Samples with the same source share a sampling session, because each sampling session adds rows to the store. A
        sample with an idempotency key has its own sampling session, which is the same at every server.
        """
        if keyed is not None:
            return (await self._open_own(source, keyed)).sampling_session_id
        drawn_from = (source.tenant, source.base_model, source.model_path, source.manifest_digest)
        known = self._of_samples.get(drawn_from)
        if known is not None:
            with suppress(Gone, NotFound):
                await self._sessions.active(source.tenant, known.session_id)
                return known.sampling_session_id
        opened = await self._open_own(source, None)
        self._of_samples.put(drawn_from, opened)
        return opened.sampling_session_id

    async def once(self, tenant: str, model: str) -> Sampler:
        """Return the sampler for a request without a session.

        The name is a base model, a checkpoint's path, both as `<base model>;<path>`, or a promoted name.

        The name is resolved only once, so that the whole request uses the same weights. Raises NotFound if this tenant
        cannot sample the model.
        """
        sampling_session_id = sampling_session_id_of(f"once-{uuid.uuid4().hex}", 0)
        session = SamplingSession(
            sampling_session_id=sampling_session_id,
            session_id="",
            sampling_session_seq_id=0,
            tenant=tenant,
            base_model=model,
            created_at=self._clock(),
        )
        base_model, has_path, path = model.rpartition(";")
        if has_path or model.startswith("tinker://"):
            session = await self._on_checkpoint(replace(session, base_model=base_model), path)
        elif find_model(self._fleet, model) is None:
            session = await self._on_promoted(replace(session, base_model=""), model)
        served = self._check_served(session.base_model)
        return await self._with_worker(replace(session, base_model=served.name))

    async def submit_once(self, sampler: Sampler, number: int, request: worker_pb2.SampleRequest) -> SampleId:
        """Submit the numbered sample of a request without a session. Raises the errors of `submit`."""
        request.sampling_session_id = sampler.session.sampling_session_id
        return (await self._submit(sampler, SampleSubmission(number, request))).sample

    def record_end(self, tenant: str, sample: SampleId) -> None:
        """Record the end of a sample that was read as text."""
        self._in_flight.record_end(tenant, str(sample))

    async def _submit(self, sampler: Sampler, submitted: SampleSubmission) -> Submission:
        request, session, tenant = submitted.request, sampler.session, sampler.session.tenant
        self._in_flight.admit(tenant)
        need = Need(tenant, session.base_model, worker_id=sampler.worker_id)
        if not request.HasField("rejection") and _has_adapter(session):
            checkpoint = await self._checkpoint(session)
            need = replace(need, rank=checkpoint.lora_rank, save=save_of(checkpoint, sampler.worker_id))
        try:
            sample = await self._dispatch.give(need, submitted.seq_id, request)
        except TooManySamples:
            self._check_still_served(need)
            raise
        self._away.note_there((need.base_model, need.rank))
        self._in_flight.record_poll(tenant, str(sample))
        return Submission(sample, sample.sequence_ids(request.num_samples))

    async def await_result(self, tenant: str, sample: SampleId, deadline: float) -> worker_pb2.AwaitReply:
        """Return the state of the sample.

        Raises NotFound for another tenant's sample, and the errors of `Dispatch.await_result`.
        """
        await self._sampler(tenant, sample.sampling_session_id)
        self._in_flight.record_poll(tenant, str(sample))
        try:
            reply = await self._dispatch.await_result(sample, deadline)
        except Gone:
            self._in_flight.record_end(tenant, str(sample))
            raise
        if reply.WhichOneof("state") != "pending":
            self._in_flight.record_end(tenant, str(sample))
        return reply

    async def cancel(self, tenant: str, sample: SampleId) -> None:
        """Cancel the sample, and free the quota that it uses. Raises NotFound, and the errors of `Dispatch.cancel`."""
        await self._sampler(tenant, sample.sampling_session_id)
        try:
            await self._dispatch.cancel(sample)
        finally:
            self._in_flight.record_end(tenant, str(sample))

    async def _sampler(self, tenant: str, sampling_session_id: str) -> Sampler:
        sampler = self._known.get(sampling_session_id) or await self._read(sampling_session_id)
        if sampler is None or sampler.session.tenant != tenant:
            raise NotFound(f"there is no sampling session {sampling_session_id}")
        self._known[sampling_session_id] = sampler
        self._known.move_to_end(sampling_session_id)
        if len(self._known) > CACHED_SESSIONS:
            self._known.popitem(last=False)
        bind_ids(session_id=sampler.session.session_id, sampling_session_id=sampling_session_id)
        await self._sessions.note_call(sampler.session.session_id)
        return sampler

    async def _read(self, sampling_session_id: str) -> Sampler | None:
        session = await self._store.get_sampling_session(sampling_session_id)
        if session is None:
            return None
        return await self._with_worker(session)

    async def _with_worker(self, session: SamplingSession) -> Sampler:
        run_id = session.model_id or (parse_tinker_path(session.model_path).run_id if session.model_path else None)
        model = await self._store.get_model(run_id) if run_id else None
        return Sampler(session, model.worker_id if model else "")

    def _check_still_served(self, need: Need) -> None:
        """Check that the model of an open sampling session is still served.

        Raises TooManySamples for some minutes, and Unprocessable after that.
        """
        model = (need.base_model, need.rank)
        try:
            self._check_served(*model)
        except Unprocessable as error:
            if self._away.is_over(model):
                raise
            raise TooManySamples(str(error)) from error
        self._away.note_there(model)

    def _check_served(self, base_model: str, rank: int = 0) -> ServedModel:
        """Return the model. Raises Unprocessable if a sample would wait without end: no model or sampler fits."""
        try:
            served = served_model(self._fleet, base_model)
        except NotServed as error:
            raise Unprocessable(str(error)) from error
        if not served.sampling:
            raise Unprocessable(training_only(base_model))
        limit = served.max_sampling_rank
        if limit is not None and rank > limit:
            raise Unprocessable(
                f"the adapter has LoRA rank {rank}, and {base_model} is sampled up to rank {limit}; ask an "
                "administrator to raise maxRank of its SamplerPool"
            )
        return served

    async def _checkpoint(self, session: SamplingSession) -> Checkpoint:
        """Return the checkpoint from which the sampling session samples.

        Raises Gone if the checkpoint is not kept any more.
        """
        source = session
        if session.inflight and session.model_id is not None:
            source = await self._store.newest_inflight(session.model_id) or session
        checkpoint = await self._weights(source)
        if checkpoint is None or checkpoint.directory != source.checkpoint_directory:
            raise Gone(_missing_weights_message(source))
        return checkpoint

    async def _weights(self, session: SamplingSession) -> Checkpoint | None:
        if session.model_path is None:
            return await self._lookup.live(session.model_id or "", "ephemeral", session.sampling_session_id)
        try:
            return await self._lookup.readable(session.tenant, session.model_path, "sampler")
        except CheckpointRefused:
            return None


def _missing_weights_message(session: SamplingSession) -> str:
    if session.model_path is not None:
        return (
            f"{session.model_path} was deleted, overwritten or has expired since its sampling client was created; "
            "create a sampling client of another checkpoint"
        )
    return (
        f"the weights of sampling session {session.sampling_session_id} were saved without a name and are no longer "
        "kept; create another sampling client from the training client, or save the weights under a name"
    )


class MissingTracker(Generic[K]):
    """A tracker of missing models.

    If no report about a model arrives for the tracker's `length`, the model's time starts again with the next report.
    """

    def __init__(self, length: timedelta, clock: Callable[[], datetime]) -> None:
        self._length = length
        self._clock = clock
        # The first and the last time at which the model was reported missing.
        self._missed: dict[K, tuple[datetime, datetime]] = {}

    def is_over(self, thing: K) -> bool:
        """Record that the model is missing.

        Return whether the model has been missing for longer than the tracker's `length`.
        """
        now = self._clock()
        since, last = self._missed.get(thing, (now, now))
        if now - last > self._length:
            since = now
        self._missed[thing] = (since, now)
        return now - since > self._length

    def note_there(self, thing: K) -> None:
        self._missed.pop(thing, None)


def _has_adapter(session: SamplingSession) -> bool:
    return session.model_path is not None or session.model_id is not None
