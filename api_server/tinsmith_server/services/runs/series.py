"""The series of runs: steps that workers have reported, and values that clients report; read in parts, or live."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tinsmith_server.errors import TooBusy, Unprocessable
from tinsmith_server.services.polling.long_polls import LongPolls, SharedCalls
from tinsmith_server.services.rows import RowCache, owned_model
from tinsmith_server.store.records import Clock, RunReport, RunStep, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.requests import RunMetricsRequest

LOOK_SECONDS = 1.0
"""The time between two looks of a live stream into the store."""
ALIVE_LOOKS = 15
"""A stream without news shows after this number of looks that it is alive."""
STREAM_LOOKS = 900
"""The looks of one stream. The client then opens another one, which needs a key that is still valid."""
LIVE_STREAMS = 64
"""The live streams of one tenant at one server."""
LIVE_POINTS = 1000
DIGEST_SECONDS = LOOK_SECONDS / 2
"""The time for which the streams of one tenant share what they have read of its runs."""


@dataclass(frozen=True, slots=True)
class SeriesPart:
    """A part of a run's series, and the cursors behind it."""

    steps: Sequence[RunStep]
    reports: Sequence[RunReport]
    after: int
    after_reported: int
    more: bool


class RunSeries:
    """The series of all runs."""

    def __init__(self, store: Store, long_polls: LongPolls, most_report_bytes: int, clock: Clock = utc_now) -> None:
        """Start. `most_report_bytes` limits the reports of one run."""
        self._store = store
        self._long_polls = long_polls
        self._most_report_bytes = most_report_bytes
        self._clock = clock
        self._live: Counter[str] = Counter()
        self._digests: RowCache[str, object] = RowCache(DIGEST_SECONDS)
        self._reads: SharedCalls[str, object] = SharedCalls()

    async def part(self, tenant: str, run_id: str, after: int, after_reported: int, limit: int) -> SeriesPart:
        """Return at most `limit` points of each kind after the cursors. Raises NotFound."""
        await owned_model(self._store, tenant, run_id)
        return await self._part(run_id, after, after_reported, limit)

    async def report(self, tenant: str, run_id: str, request: RunMetricsRequest) -> None:
        """Add the values that a client reports. Raises NotFound, and Unprocessable if the run has too many reports."""
        await owned_model(self._store, tenant, run_id)
        now = self._clock()
        reports = [RunReport(run_id, point.step, 0, point.time or now, point.known) for point in request.metrics]
        reports = [one for one in reports if one.values]
        limit = self._most_report_bytes
        if not await self._store.add_reports(run_id, reports, limit, request.total_steps):
            raise Unprocessable(
                f"{run_id} has reported {limit} bytes of metrics, the limit of one run (setting "
                "reported_metrics_bytes_per_run): report fewer names, or report them at fewer steps"
            )

    async def live(
        self, tenant: str, run_id: str, after: int, after_reported: int
    ) -> AsyncGenerator[SeriesPart | None, None]:
        """Yield parts as the series grows, and None at first and from time to time.

        Raises NotFound and TooBusy before the first part.
        """
        await owned_model(self._store, tenant, run_id)
        with self._stream_of(tenant):
            async for is_due in self._looks():
                part = await self._part(run_id, after, after_reported, LIVE_POINTS)
                if part.steps or part.reports:
                    yield part
                elif is_due:
                    yield None
                after, after_reported = part.after, part.after_reported

    async def live_list(self, tenant: str) -> AsyncGenerator[bool, None]:
        """Yield True when a list of the tenant's runs has changed, and False from time to time. Raises TooBusy."""
        with self._stream_of(tenant):
            seen: object = None
            async for is_due in self._looks():
                now = await self._digest(tenant)
                if seen != now:
                    yield True
                elif is_due:
                    yield False
                seen = now

    async def _digest(self, tenant: str) -> object:
        digest = self._digests.get(tenant)
        if digest is None:
            digest = await self._reads.result(tenant, lambda: self._store.runs_digest(tenant))
            self._digests.put(tenant, digest)
        return digest

    async def _looks(self) -> AsyncIterator[bool]:
        """Yield once for each look of a stream: whether the stream is to show that it is alive.

        The looks end early if the server stops.
        """
        for number in range(STREAM_LOOKS):
            yield number % ALIVE_LOOKS == 0
            if await self._long_polls.hold(asyncio.sleep(LOOK_SECONDS, False), released=True):
                return

    @contextmanager
    def _stream_of(self, tenant: str) -> Iterator[None]:
        if self._live[tenant] >= LIVE_STREAMS:
            raise TooBusy(f"{LIVE_STREAMS} live streams of {tenant} are open at this server: close some, or poll")
        self._live[tenant] += 1
        try:
            yield
        finally:
            self._live[tenant] -= 1
            if not self._live[tenant]:
                del self._live[tenant]

    async def _part(self, run_id: str, after: int, after_reported: int, limit: int) -> SeriesPart:
        steps = await self._store.run_steps(run_id, after, limit)
        reports = await self._store.run_reports(run_id, after_reported, limit)
        return SeriesPart(
            steps=steps,
            reports=reports,
            after=steps[-1].position if steps else after,
            after_reported=reports[-1].revision if reports else after_reported,
            more=limit in (len(steps), len(reports)),
        )
