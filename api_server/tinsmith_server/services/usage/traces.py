"""Traces of a session's operations and samples, for Perfetto and chrome://tracing.

The format is Chrome's "Trace Event Format": complete events, with times in microseconds.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import orjson
from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import NotFound, WorkerError
from tinsmith_server.fleet.base import Fleet, SamplerHandle, describable_handles
from tinsmith_server.services.checkpoints.download_links import sign, verify
from tinsmith_server.services.rows import owned_session
from tinsmith_server.store.records import Clock, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import OperationId, session_of

SECRET_NAME = "trace-urls"
TRACE_PATH = "/api/v1/traces"
ASK_SECONDS = 10.0
MOST_SPANS = 20_000
"""The maximum number of spans of all workers together.

The newest spans are kept. This number of spans takes some megabytes.
"""
AT_ONCE = 2
MICROSECONDS = 10**6


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of one worker or sampler."""

    base_model: str
    spans: Sequence[worker_pb2.Span]


class Traces:
    """Links to traces. A link is signed and expires. A trace is made when its link is opened."""

    def __init__(self, store: Store, fleet: Fleet, ttl_seconds: float, clock: Clock = utc_now) -> None:
        self._store = store
        self._fleet = fleet
        self._ttl = timedelta(seconds=ttl_seconds)
        self._clock = clock
        self._making = asyncio.Semaphore(AT_ONCE)

    async def link(self, tenant: str, session_id: str, base_url: str) -> str:
        """Return a link. Raises NotFound for an unknown session, and for another tenant's session."""
        await owned_session(self._store, tenant, session_id)
        token = sign(await self._store.secret(SECRET_NAME), session_id, self._clock() + self._ttl)
        return f"{base_url.rstrip('/')}{TRACE_PATH}/{token}"

    async def trace(self, token: str) -> bytes:
        """Return the trace as JSON. Workers that do not answer are left out.

        Raises NotFound for a forged or expired link.
        """
        session_id = verify(await self._store.secret(SECRET_NAME), token, self._clock())
        if session_id is None:
            raise NotFound("this link to a trace is invalid or has expired; request a new one")
        async with self._making:
            handles = describable_handles(self._fleet)
            answers = await asyncio.gather(*(_ask(handle, session_id) for handle in handles))
            return await asyncio.to_thread(trace_of, session_id, answers, self._clock().timestamp())


async def _ask(handle: SamplerHandle, session_id: str) -> Spans:
    worker = handle.running()
    if worker is not None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return Spans(handle.base_model, (await worker.timeline(session_id)).spans)
        except (WorkerError, TimeoutError):
            pass
    return Spans(handle.base_model, ())


def trace_of(session_id: str, answers: Iterable[Spans], now: float) -> bytes:
    """Return the trace. The trace has one process for each model and for each sampling session.

    A process has one track for each simultaneous operation, so that the spans on a track do not overlap. Spans that
    have not ended reach until `now`, in Unix seconds.
    """
    found = [(one.base_model, span) for one in answers for span in one.spans if session_of(span.owner) == session_id]
    found.sort(key=lambda each: each[1].submitted)
    owners: defaultdict[tuple[str, str], list[worker_pb2.Span]] = defaultdict(list)
    for base_model, span in found[-MOST_SPANS:]:
        owners[span.owner, base_model].append(span)
    events: list[dict[str, Any]] = []
    for process, ((owner, base_model), spans) in enumerate(sorted(owners.items()), start=1):
        events.append(_named(process, f"{owner} on {base_model}"))
        for span, track in _on_tracks(spans, now):
            events += _events(span, process, track, now)
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"session_id": session_id}}
    return orjson.dumps(content)


def _named(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _on_tracks(spans: Iterable[worker_pb2.Span], now: float) -> Iterator[tuple[worker_pb2.Span, int]]:
    """Yield each span with its track: the track that has been free longest, or a new track.

    `spans` are ordered by their start times.
    """
    free: list[tuple[int, int]] = []
    for span in spans:
        begin, _, end = _times(span, now)
        if free and free[0][0] <= begin:
            _, track = heapq.heappop(free)
        else:
            track = len(free) + 1
        heapq.heappush(free, (end, track))
        yield span, track


def _events(span: worker_pb2.Span, process: int, track: int, now: float) -> Iterator[dict[str, Any]]:
    """Yield an event for the whole span, an event for the waiting part, and an event for the computing part."""
    submitted, started, ended = _times(span, now)
    category = "sampling" if span.request_id else "training"
    request_id = span.request_id or str(OperationId(span.owner, span.seq_id))
    state = "failed" if span.failed else "done" if span.ended else "running"
    arguments = {"request_id": request_id, "state": state}
    parts = [(span.name, submitted, ended), ("waiting", submitted, started), ("computing", started, ended)]
    for name, begin, end in parts if span.started else parts[:1]:
        yield {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": process,
            "tid": track,
            "ts": begin,
            "dur": end - begin,
            "args": arguments,
        }


def _times(span: worker_pb2.Span, now: float) -> tuple[int, int, int]:
    """Return the times of acceptance, start and end, in ascending order.

    Times are corrected if a clock was set back in between.
    """
    submitted = round(span.submitted * MICROSECONDS)
    started = max(submitted, round(span.started * MICROSECONDS))
    return submitted, started, max(started, round((span.ended or now) * MICROSECONDS))
