"""The answers of `retrieve_futures`: the ended samples of a sampling client.

A poll is held until a sample ends. The samplers record which samples they have reported to each client, so any server
may answer the next poll. A server remembers only the time of its last search for lost samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import WorkerUnavailable
from tinsmith_server.fleet.base import Fleet, SamplerHandle
from tinsmith_server.fleet.names import share_weights
from tinsmith_server.services.accounts.quotas import SamplesInFlight
from tinsmith_server.services.polling.long_polls import STOPPING, LongPolls, Pending
from tinsmith_server.services.sampling.dispatch import Dispatch
from tinsmith_server.services.sampling.sampling import Sampling
from tinsmith_server.wire.ids import SampleId, parse_request_id, sampler_token

# The interval of searches for samples that were lost with a sampler's memory.
LOOK_SECONDS = 5.0
# A sampler that cannot be reached must not delay the others' reports.
REPORT_SECONDS = 5.0
CLIENTS_REMEMBERED = 4096

RequestsBySampler = dict[str, list[str]]
"""The request IDs of samples that no client has fetched from this server, by the token of the sampler."""


@dataclass(frozen=True, slots=True)
class SampleClient:
    """A client of a sampling session. The first client has the number 0."""

    tenant: str
    sampling_session_id: str
    number: int


@dataclass(frozen=True, slots=True)
class EndedSamples:
    """The samples that ended after the given cursor, and the new cursor."""

    ended: Sequence[worker_pb2.EndedSample]
    cursor: int


class SamplePolls:
    """Polls for ended samples. A cursor is the number of a round of reports.

    The number of a round is the time in microseconds since 1970, or slightly more.
    """

    def __init__(
        self,
        *,
        sampling: Sampling,
        dispatch: Dispatch,
        fleet: Fleet,
        in_flight: SamplesInFlight,
        long_polls: LongPolls,
        hold_seconds: float,
    ) -> None:
        self._sampling = sampling
        self._dispatch = dispatch
        self._fleet = fleet
        self._in_flight = in_flight
        self._long_polls = long_polls
        self._hold_seconds = hold_seconds
        # The time of the last search for each client's lost samples.
        self._looked: OrderedDict[SampleClient, float] = OrderedDict()

    async def poll(self, client: SampleClient, cursor: int, timeout_seconds: float | None) -> EndedSamples | Pending:
        """Return the ended samples.

        Raises NotFound for a sampling session that the tenant does not have, and Unprocessable if a sampler cannot
        report ended samples.
        """
        session = await self._sampling.owned(client.tenant, client.sampling_session_id)
        hold = self._hold_seconds if timeout_seconds is None else min(timeout_seconds, self._hold_seconds)
        deadline = asyncio.get_running_loop().time() + hold
        return await self._long_polls.hold(self._poll(client, session.base_model, cursor, deadline), released=STOPPING)

    async def _poll(self, client: SampleClient, base_model: str, cursor: int, deadline: float) -> EndedSamples:
        while True:
            unfetched = self._unfetched(client) if self._is_time_to_look(client) else {}
            found = await self._reported(client, base_model, cursor, unfetched)
            if found.ended or _remaining(deadline) == 0:
                return found
            await self._until_any(client, base_model, cursor, min(_remaining(deadline), LOOK_SECONDS))

    async def _reported(
        self, client: SampleClient, base_model: str, cursor: int, unfetched: RequestsBySampler
    ) -> EndedSamples:
        """Return the ended samples of all samplers, in one round."""
        round = max(cursor + 1, time.time_ns() // 1000)

        def request(sampler: SamplerHandle) -> worker_pb2.AwaitSamplesRequest:
            expected = unfetched.get(sampler_token(sampler.sampler_id), ())
            return _request(client, cursor, round=round, expected=expected)

        # Skip samplers that do not answer, because they would delay the others. `_until_any` waits for them.
        samplers = [one for one in self._samplers(base_model) if self._dispatch.answers(one)]
        replies = await asyncio.gather(*(self._ask(sampler, request(sampler), REPORT_SECONDS) for sampler in samplers))
        ended = [one for reply in replies for one in reply.ended] + await self._lost(unfetched)
        if not ended:
            return EndedSamples((), cursor)
        return EndedSamples(ended, max(round, *(reply.round for reply in replies)) if replies else round)

    async def _until_any(self, client: SampleClient, base_model: str, cursor: int, seconds: float) -> None:
        """Wait until a sampler has a report, a new sampler appears, or the time is over."""

        async def any_of(sampler: SamplerHandle) -> None:
            request = _request(client, cursor, timeout_seconds=seconds)
            if not (await self._ask(sampler, request, seconds)).any:
                await asyncio.sleep(seconds)

        waits = [asyncio.ensure_future(any_of(sampler)) for sampler in self._samplers(base_model)]
        waits.append(asyncio.ensure_future(self._fleet.changes.beyond(self._fleet.changes.count)))
        try:
            done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            for one in waits:
                one.cancel()

    async def _ask(
        self, sampler: SamplerHandle, request: worker_pb2.AwaitSamplesRequest, connect_seconds: float
    ) -> worker_pb2.AwaitSamplesReply:
        """Ask one sampler. A sampler that cannot be reached reports later."""
        try:
            async with asyncio.timeout(request.timeout_seconds + REPORT_SECONDS):
                reply = await (await sampler.connection(connect_seconds)).await_samples(request)
                self._dispatch.note_answer(sampler)
                return reply
        except (WorkerUnavailable, TimeoutError):
            return worker_pb2.AwaitSamplesReply()

    async def _lost(self, unfetched: RequestsBySampler) -> list[worker_pb2.EndedSample]:
        """Return the samples of samplers that no longer exist. The SDK submits lost samples again."""
        by_sampler = list(unfetched.values())
        are_lost = await asyncio.gather(*(self._is_lost(request_ids[0]) for request_ids in by_sampler))
        lost = [
            one for request_ids, is_lost in zip(by_sampler, are_lost, strict=True) if is_lost for one in request_ids
        ]
        return [worker_pb2.EndedSample(request_id=one, failed=True) for one in lost]

    async def _is_lost(self, request_id: str) -> bool:
        sample = parse_request_id(request_id)
        if not isinstance(sample, SampleId) or self._dispatch.finds(sample):
            return False
        with contextlib.suppress(WorkerUnavailable):
            return await self._dispatch.is_lost(sample, REPORT_SECONDS)
        return False

    def _samplers(self, base_model: str) -> list[SamplerHandle]:
        """Return the samplers that may have samples of the base model, including those that take no new samples."""
        return [one for one in self._fleet.all_samplers if share_weights(self._fleet, one.base_model, base_model)]

    def _unfetched(self, client: SampleClient) -> RequestsBySampler:
        unfetched: defaultdict[str, list[str]] = defaultdict(list)
        for request_id in self._in_flight.unfetched(client.tenant, client.sampling_session_id):
            sample = parse_request_id(request_id)
            if isinstance(sample, SampleId) and sample.client == client.number:
                # This poll covers all samples of the client.
                self._in_flight.record_poll(client.tenant, request_id)
                unfetched[sample.sampler_token].append(request_id)
        return unfetched

    def _is_time_to_look(self, client: SampleClient) -> bool:
        now = asyncio.get_running_loop().time()
        if now - self._looked.get(client, -LOOK_SECONDS) < LOOK_SECONDS:
            return False
        self._looked[client] = now
        self._looked.move_to_end(client)
        if len(self._looked) > CLIENTS_REMEMBERED:
            self._looked.popitem(last=False)
        return True


def _request(
    client: SampleClient,
    cursor: int,
    *,
    round: int = 0,
    timeout_seconds: float = 0,
    expected: Sequence[str] = (),
) -> worker_pb2.AwaitSamplesRequest:
    return worker_pb2.AwaitSamplesRequest(
        sampling_session_id=client.sampling_session_id,
        client=client.number,
        seen=cursor,
        round=round,
        timeout_seconds=timeout_seconds,
        expected=expected,
    )


def _remaining(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())
