"""The dispatch of samples to the samplers of a base model, and the later search for these samples."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import Gone, TooManySamples, Unprocessable, WorkerUnavailable, WorkerUnstartable
from tinsmith_server.fleet.base import Fleet, SamplerClient, SamplerHandle, SamplerKind
from tinsmith_server.metrics.workers import SamplingFigures
from tinsmith_server.services.rows import RowCache
from tinsmith_server.services.sampling.adapter_delivery import Save, SaveSources
from tinsmith_server.services.sampling.routing import SamplerLoads, cache_key, preference
from tinsmith_server.wire.ids import SampleId, sampler_token

# The time is short, because after a 503 the SDK retries a submission only for 300 s, but after a 429 without limit.
CONNECT_SECONDS = 20.0
# This limit leaves time for other samplers if one hangs. A worker that trains may be slow, and is asked last.
POOL_SAMPLE_SECONDS = 5.0
# A longer wait would delay a program that only wants to exit.
CANCEL_SECONDS = 5.0
# Another server may see a new replica earlier, and submit a sample there. This server may then get the sample's poll.
UNSEEN_SECONDS = 2.0
# The minimum time of a search, even if the poll's hold is shorter. It covers the wait above and a list of the fleet.
LOOK_SECONDS = 7.0
# After a sampler was missing in a list of the fleet, it is not searched again for this long, unless it appears in
# between.
MISSING_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Need:
    """The weights and the tenant of a sample. `save` is the adapter. None means the weights of the base model.

    `worker_id` is the worker that made the adapter, if this worker is known.
    """

    tenant: str
    base_model: str
    rank: int = 0
    worker_id: str = ""
    save: Save | None = None


class Dispatch:
    """The dispatch of samples: first to pools, then to workers that also train."""

    def __init__(self, fleet: Fleet, loads: SamplerLoads, sources: SaveSources) -> None:
        self._fleet = fleet
        self._loads = loads
        self._sources = sources
        self._missing: RowCache[str, bool] = RowCache(MISSING_SECONDS)
        self._accepted_samples: Counter[tuple[str, str]] = Counter()
        self._passed_on: Counter[str] = Counter()

    def figures(self) -> SamplingFigures:
        """Return the numbers for metrics. The number for a base model without a sampler is 0."""
        served = [model.name for model in self._fleet.models if model.sampling]
        accepting = {
            (name, kind): sum(one.kind == kind and one.accepting for one in self._fleet.samplers(name))
            for name in served
            for kind in get_args(SamplerKind)
        }
        return SamplingFigures(self._accepted_samples, self._passed_on, accepting)

    async def give(self, need: Need, seq_id: int, request: worker_pb2.SampleRequest) -> SampleId:
        """Submit a sample, and return its ID. The ID names the sampler.

        Raises TooManySamples if no sampler accepts the sample. The SDK then retries without a limit.
        """
        self._fleet.want_samplers(need.base_model, need.rank)
        samplers = self._fleet.samplers(need.base_model, need.rank)
        deadline = asyncio.get_running_loop().time() + CONNECT_SECONDS
        failure: WorkerUnavailable | None = None
        for kind in get_args(SamplerKind):
            ordered = self._in_order([one for one in samplers if one.kind == kind], need, request)
            try:
                taken = await self._offer(ordered, need, seq_id, request, deadline)
            except WorkerUnavailable as error:
                failure = error
                continue
            if taken is not None:
                return taken
        raise await self._refusal(need, failure)

    async def await_result(self, sample: SampleId, deadline: float) -> worker_pb2.AwaitReply:
        """Return the state of the sample.

        Raises Gone if the sample is lost, and WorkerUnavailable while the loss is uncertain.
        """
        holder = await self._holder_by(sample, deadline)
        client = await holder.connection(_remaining(deadline))
        reply = await client.await_sample(str(sample), _remaining(deadline))
        if reply.WhichOneof("state") != "pending":
            self._loads.record_end(holder.sampler_id, str(sample))
        return reply

    def answers(self, sampler: SamplerHandle) -> bool:
        """Return whether the sampler is connected and answered the last call."""
        return sampler.running() is not None and self._loads.answers(sampler.sampler_id)

    def note_answer(self, sampler: SamplerHandle) -> None:
        self._loads.note_answer(sampler.sampler_id)

    async def is_lost(self, sample: SampleId, seconds: float) -> bool:
        """Return whether the sample is lost.

        Raises WorkerUnavailable if the answer is still uncertain after `seconds`.
        """
        try:
            await self._holder_by(sample, asyncio.get_running_loop().time() + seconds)
        except Gone:
            return True
        return False

    def finds(self, sample: SampleId) -> bool:
        """Return whether the sample's sampler is in the fleet."""
        return self._find(sample) is not None

    async def await_text(self, sample: SampleId, seen: int, deadline: float) -> worker_pb2.AwaitTextReply:
        """Return the pieces of text that the client has not read yet. Raises the errors of `await_result`."""
        holder = await self._holder_by(sample, deadline)
        client = await holder.connection(_remaining(deadline))
        reply = await client.await_text(str(sample), seen, _remaining(deadline))
        if reply.WhichOneof("state") != "pending":
            self._loads.record_end(holder.sampler_id, str(sample))
        return reply

    async def render(self, need: Need, request: worker_pb2.RenderPromptRequest) -> worker_pb2.RenderPromptReply:
        """Render a prompt at any sampler of the base model.

        Raises Unprocessable for an invalid prompt, and the errors of `give`.
        """
        samplers = sorted(self._fleet.samplers(need.base_model, need.rank), key=lambda one: one.running() is None)
        deadline = asyncio.get_running_loop().time() + CONNECT_SECONDS
        failure: WorkerUnavailable | None = None
        for sampler in samplers:
            try:
                client = await sampler.connection(_remaining(deadline))
                return await client.render_prompt(request, need.tenant)
            except WorkerUnavailable as error:
                failure = error
        raise await self._refusal(need, failure)

    async def cancel(self, sample: SampleId) -> None:
        """Cancel a sample. Returns when the sample's sampler has received the cancellation.

        A sampler that has ended is not started again. Raises WorkerUnavailable if the sampler cannot be reached. For
        example, a server that has just started may not be connected yet while the sampler still works on the sample.
        """
        try:
            holder = await self._holder(sample)
        except Gone:
            return
        if holder.running() is not None or holder.outlives_connections:
            client = await holder.connection(CANCEL_SECONDS)
            await client.cancel_sample(str(sample))

    def _in_order(
        self, samplers: Sequence[SamplerHandle], need: Need, request: worker_pb2.SampleRequest
    ) -> list[SamplerHandle]:
        """Return the samplers in the order in which the sample is offered.

        The worker with the weights in memory is first, and samplers that do not answer are last.
        """
        if len(samplers) < 2:
            return list(samplers)
        key = cache_key(need.save.manifest_digest if need.save else "", request.prompt_tokens)
        by_id = {one.sampler_id: one for one in samplers}
        ordered = [by_id[sampler_id] for sampler_id in preference(key, self._loads.of(samplers))]

        def put_off(one: SamplerHandle) -> tuple[bool, bool, bool]:
            return one.running() is None, not self._loads.answers(one.sampler_id), one.sampler_id != need.worker_id

        return sorted(ordered, key=put_off)

    async def _offer(
        self,
        samplers: Sequence[SamplerHandle],
        need: Need,
        seq_id: int,
        request: worker_pb2.SampleRequest,
        deadline: float,
    ) -> SampleId | None:
        """Offer the sample to the samplers, one after the other. Returns None if the base model has no sampler.

        Raises TooManySamples if all samplers that can be reached are full, and WorkerUnavailable if no sampler can be
        reached.
        """
        full: TooManySamples | None = None
        failure: WorkerUnavailable | None = None
        for sampler in samplers:
            if failure is not None and _remaining(deadline) == 0:
                break  # otherwise several silent samplers would hold one request for minutes
            if full or failure:
                self._passed_on[sampler.base_model] += 1
            try:
                return await self._submit(sampler, need, seq_id, request, deadline)
            except TooManySamples as error:
                full = error
            except WorkerUnavailable as error:
                failure = error
        if full is not None:
            raise full
        if failure is not None:
            raise failure
        return None

    async def _submit(
        self, sampler: SamplerHandle, need: Need, seq_id: int, request: worker_pb2.SampleRequest, deadline: float
    ) -> SampleId:
        client = await sampler.connection(_remaining(deadline))
        sample = SampleId(request.sampling_session_id, seq_id, sampler_token(sampler.sampler_id))
        request.request_id = str(sample)
        if need.save is not None:
            request.adapter.CopyFrom(self._sources.adapter_for(sampler, need.save))
        try:
            await _sample(client, request, need.tenant, POOL_SAMPLE_SECONDS if sampler.kind == "pool" else None)
        except WorkerUnavailable:
            self._loads.note_silent(sampler.sampler_id)
            raise
        self._loads.note_taken(sampler.sampler_id, request.request_id)
        self._accepted_samples[sampler.base_model, sampler.kind] += 1
        return sample

    async def _refusal(self, need: Need, failure: WorkerUnavailable | None) -> Exception:
        if isinstance(failure, WorkerUnstartable):
            # The error is final. After a 5xx or a 429 the SDK would retry the sample without limit.
            return Unprocessable(str(failure))
        if failure is not None:
            return TooManySamples(str(failure))
        return TooManySamples(await self._fleet.provide(need.base_model, rank=need.rank, sampling=True))

    async def _holder_by(self, sample: SampleId, deadline: float) -> SamplerHandle:
        """Return the sampler that has the sample.

        Raises WorkerUnavailable if the sampler is not known at the deadline, or after LOOK_SECONDS.
        """
        try:
            async with asyncio.timeout_at(max(deadline, asyncio.get_running_loop().time() + LOOK_SECONDS)):
                return await self._holder(sample)
        except TimeoutError:
            raise WorkerUnavailable(f"the sampler of {sample} has not been found yet; retry") from None

    async def _holder(self, sample: SampleId) -> SamplerHandle:
        until = asyncio.get_running_loop().time() + UNSEEN_SECONDS
        while True:
            seen = self._fleet.changes.count
            holder = self._find(sample)
            if holder is not None:
                self._missing.forget(sample.sampler_token)
                return holder
            if self._fleet.problem is not None:
                raise WorkerUnavailable(self._fleet.problem)
            if _remaining(until) == 0:
                return await self._look_for(sample)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_remaining(until)):
                    await self._fleet.changes.beyond(seen)

    async def _look_for(self, sample: SampleId) -> SamplerHandle:
        """Search the fleet before the sample counts as lost.

        Another server may have used a sampler that this server does not know yet.
        """
        token = sample.sampler_token
        is_known_missing = self._missing.get(token)
        if not is_known_missing:
            await self._fleet.refresh()
        holder = self._find(sample)
        if holder is None:
            if not is_known_missing:
                self._missing.put(token, True)
            raise Gone(f"the sampler of {sample} is gone; submit the sample again")
        return holder

    def _find(self, sample: SampleId) -> SamplerHandle | None:
        token = sample.sampler_token
        return next((one for one in self._fleet.all_samplers if sampler_token(one.sampler_id) == token), None)


async def _sample(
    client: SamplerClient, request: worker_pb2.SampleRequest, tenant: str, timeout_seconds: float | None
) -> None:
    try:
        async with asyncio.timeout(timeout_seconds):
            await client.sample(request, tenant)
    except TimeoutError:
        raise WorkerUnavailable(f"the sampler has not answered for {timeout_seconds:g} s") from None


def _remaining(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())
