"""What one tenant may hold at a time: adapters, queued operations, checkpoints, samples that nobody has fetched."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import TooBusy, TooManySamples
from tinsmith_server.settings import Settings
from tinsmith_server.store.store import Store

GIB = 2**30
# A sample that is still wanted is asked for again within a poll's hold.
ASKED_FOR_SECONDS = 60.0
PATIENCE_SECONDS = 20.0
REMEMBERED = 65536


class AdapterQuota:
    """Models that live: accepted, or at a worker."""

    def __init__(self, store: Store, most: int) -> None:
        self._store = store
        self._most = most
        self._creating: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def one_more(self, tenant: str) -> AsyncIterator[str | None]:
        """Why there may be no further one, or None; while the next one of this tenant waits."""
        async with self._creating[tenant]:
            held = await self._store.count_live_models(tenant)
            yield None if held < self._most else self._refusal(held)

    def _refusal(self, held: int) -> str:
        return (
            f"you hold {held} models, and a tenant may hold {self._most} (setting adapters_per_tenant): close sessions "
            "that are done, or wait until those without a sign of life are ended"
        )


class QueueQuota:
    """Operations that wait, by what the workers said last and what was submitted here since."""

    def __init__(self, most: int) -> None:
        self._most = most
        # By model: whose it is, and the highest number that it was given.
        self._known: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._said: Counter[str] = Counter()
        self._since: Counter[str] = Counter()
        self._refreshed = asyncio.Condition()

    async def admit(self, tenant: str, model_id: str, seq_id: int) -> None:
        """Waits for a place for as long as that may do. Raises TooBusy. `seq_id` is 0 where the worker will give one.

        What fills a gap goes through: all that is behind it waits for it.
        """
        if self._waiting(tenant) < self._most or 0 < seq_id < self._known.get(model_id, ("", 0))[1]:
            return
        try:
            async with asyncio.timeout(PATIENCE_SECONDS), self._refreshed:
                await self._refreshed.wait_for(lambda: self._waiting(tenant) < self._most)
        except TimeoutError:
            raise TooBusy(
                f"{self._waiting(tenant)} operations of yours wait, and {self._most} may (setting "
                "queued_operations_per_tenant); wait for results before you send more"
            ) from None

    def note(self, tenant: str, model_id: str, seq_id: int) -> None:
        """One was submitted."""
        self._since[tenant] += 1
        _, highest = self._known.get(model_id, ("", 0))
        self._known[model_id] = tenant, max(highest, seq_id)
        self._known.move_to_end(model_id)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    async def refresh(self, replies: Iterable[worker_pb2.DescribeReply]) -> None:
        """What the workers say now. Models that were never heard of here are counted where they are worked with."""
        said: Counter[str] = Counter()
        for reply in replies:
            for model in reply.models:
                if (known := self._known.get(model.model_id)) is not None:
                    said[known[0]] += model.queued
        self._said, self._since = said, Counter()
        async with self._refreshed:
            self._refreshed.notify_all()

    def _waiting(self, tenant: str) -> int:
        return self._said[tenant] + self._since[tenant]


class CheckpointQuota:
    """Bytes of named checkpoints. Unnamed ones have a number of their own (`ephemeral_per_tenant`)."""

    def __init__(self, store: Store, most_bytes: int) -> None:
        self._store = store
        self._most_bytes = most_bytes

    async def refusal(self, tenant: str) -> str | None:
        """Why nothing more is saved, or None."""
        held = await self._store.checkpoint_bytes(tenant)
        if held < self._most_bytes:
            return None
        return (
            f"your checkpoints have {held / GIB:.1f} GiB, and those of a tenant may have {self._most_bytes / GIB:.1f} "
            "(setting checkpoint_bytes_per_tenant); delete some (`tinker checkpoint delete`), or let them expire"
        )


class SamplesInFlight:
    """Samples that were taken and whose results were not fetched here, as long as somebody asks for them."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        # When each was asked for last; the oldest first.
        self._asked: defaultdict[str, OrderedDict[str, float]] = defaultdict(OrderedDict)

    def admit(self, tenant: str) -> None:
        """Raises TooManySamples, which the SDK waits out without limit."""
        samples = self._asked[tenant]
        while samples and next(iter(samples.values())) + ASKED_FOR_SECONDS < self._clock():
            samples.popitem(last=False)
        if len(samples) >= self._most:
            raise TooManySamples(
                f"{len(samples)} samples of yours are in flight, and {self._most} may be (setting samples_per_tenant)"
            )

    def record_poll(self, tenant: str, sample: str) -> None:
        samples = self._asked[tenant]
        samples[sample] = self._clock()
        samples.move_to_end(sample)

    def wanted(self, tenant: str, sampling_session_id: str) -> list[str]:
        """Of those that were taken, and not fetched here."""
        prefix = f"{sampling_session_id}:"
        return [sample for sample in self._asked[tenant] if sample.startswith(prefix)]

    def record_end(self, tenant: str, sample: str) -> None:
        self._asked[tenant].pop(sample, None)


class TenantQuotas:
    """All of them."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.adapters = AdapterQuota(store, settings.adapters_per_tenant)
        self.queued = QueueQuota(settings.queued_operations_per_tenant)
        self.checkpoints = CheckpointQuota(store, settings.checkpoint_bytes_per_tenant)
        self.samples = SamplesInFlight(settings.samples_per_tenant)
