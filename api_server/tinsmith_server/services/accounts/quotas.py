"""Quotas of a tenant: models, queued operations, checkpoints, and samples in flight."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeAlias

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import TooBusy, TooManySamples
from tinsmith_server.services.accounts.limits import Limits
from tinsmith_server.settings import Settings
from tinsmith_server.store.store import Store

GIB = 2**30
Most: TypeAlias = Callable[[str], Awaitable[int]]
"""A function that returns the limit of a tenant."""
# A client that still wants a sample polls for it within a poll's hold.
POLLED_SECONDS = 60.0
PATIENCE_SECONDS = 20.0
MOST_MODELS = 65536


class AdapterQuota:
    """The quota of live models, which are models that were accepted or bound to a worker."""

    def __init__(self, store: Store, most: Most) -> None:
        self._store = store
        self._most = most
        self._creating: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def one_more(self, tenant: str) -> AsyncIterator[str | None]:
        """Yield the reason why the tenant may have no further model, or None if a further model is allowed.

        Other creations of models by the tenant wait until the context ends.
        """
        async with self._creating[tenant]:
            held, most = await self._store.count_live_models(tenant), await self._most(tenant)
            yield None if held < most else self._refusal(held, most)

    def _refusal(self, held: int, most: int) -> str:
        return (
            f"you have {held} models, and the limit is {most} (setting adapters_per_tenant, or your tenant's limit "
            "adapters): close finished sessions, or wait until silent ones are ended"
        )


class QueueQuota:
    """The quota of queued operations.

    Queued operations are counted from the workers' last descriptions and from later submissions.
    """

    def __init__(self, most: Most) -> None:
        self._most = most
        # The tenant and the highest submitted number of each model.
        self._known: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._described: Counter[str] = Counter()
        self._submitted: Counter[str] = Counter()
        self._refreshed = asyncio.Condition()

    async def admit(self, tenant: str, model_id: str, seq_id: int) -> None:
        """Wait until the tenant is below its quota. Raises TooBusy.

        `seq_id` is 0 if the worker will assign the number. An operation that fills a gap in the numbers is admitted
        immediately, because all later operations wait for it.
        """
        most = await self._most(tenant)
        if self.waiting(tenant) < most or 0 < seq_id < self._known.get(model_id, ("", 0))[1]:
            return
        try:
            async with asyncio.timeout(PATIENCE_SECONDS), self._refreshed:
                await self._refreshed.wait_for(lambda: self.waiting(tenant) < most)
        except TimeoutError:
            raise TooBusy(
                f"{self.waiting(tenant)} of your operations are queued, and the limit is {most} (setting "
                "queued_operations_per_tenant, or your tenant's limit queued_operations); wait for results before you "
                "send more"
            ) from None

    def note(self, tenant: str, model_id: str, seq_id: int) -> None:
        """Count a submission."""
        self._submitted[tenant] += 1
        _, highest = self._known.get(model_id, ("", 0))
        self._known[model_id] = tenant, max(highest, seq_id)
        self._known.move_to_end(model_id)
        if len(self._known) > MOST_MODELS:
            self._known.popitem(last=False)

    async def refresh(self, replies: Iterable[worker_pb2.DescribeReply]) -> None:
        """Replace the counts by the numbers in the workers' descriptions.

        Models that only other replicas use are counted by those replicas.
        """
        described: Counter[str] = Counter()
        for reply in replies:
            for model in reply.models:
                if (known := self._known.get(model.model_id)) is not None:
                    described[known[0]] += model.queued
        self._described, self._submitted = described, Counter()
        async with self._refreshed:
            self._refreshed.notify_all()

    def waiting(self, tenant: str) -> int:
        """Return the number of the tenant's queued operations, as far as this server knows them."""
        return self._described[tenant] + self._submitted[tenant]


class CheckpointQuota:
    """The quota on the total size of named checkpoints.

    The number of unnamed checkpoints has another limit (`ephemeral_per_tenant`).
    """

    def __init__(self, store: Store, most_bytes: Most) -> None:
        self._store = store
        self._most_bytes = most_bytes

    async def refusal(self, tenant: str) -> str | None:
        """Return the reason why nothing more may be saved, or None."""
        held, most = await self._store.checkpoint_bytes(tenant), await self._most_bytes(tenant)
        if held < most:
            return None
        return (
            f"your checkpoints have {held / GIB:.1f} GiB, and the limit is {most / GIB:.1f} (setting "
            "checkpoint_bytes_per_tenant, or your tenant's limit checkpoint_bytes); delete some (`tinker checkpoint "
            "delete`), or let them expire"
        )


class SamplesInFlight:
    """The quota of samples that this server has accepted and that no client has fetched here.

    A sample counts as long as a client polls for it.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        # The time of each sample's last poll, oldest first.
        self._polled_at: defaultdict[str, OrderedDict[str, float]] = defaultdict(OrderedDict)

    def admit(self, tenant: str) -> None:
        """Raise TooManySamples if the quota is used up. The SDK retries without limit."""
        samples = self._polled_at[tenant]
        while samples and next(iter(samples.values())) + POLLED_SECONDS < self._clock():
            samples.popitem(last=False)
        if len(samples) >= self._most:
            raise TooManySamples(
                f"{len(samples)} of your samples are in flight, and the limit is {self._most} (setting "
                "samples_per_tenant)"
            )

    def record_poll(self, tenant: str, sample: str) -> None:
        samples = self._polled_at[tenant]
        samples[sample] = self._clock()
        samples.move_to_end(sample)

    def unfetched(self, tenant: str, sampling_session_id: str) -> list[str]:
        """Return the samples of the session that this server has accepted and that no client has fetched here."""
        prefix = f"{sampling_session_id}:"
        return [sample for sample in self._polled_at[tenant] if sample.startswith(prefix)]

    def record_end(self, tenant: str, sample: str) -> None:
        self._polled_at[tenant].pop(sample, None)


class TenantQuotas:
    """The quotas that apply to each tenant."""

    def __init__(self, store: Store, settings: Settings, limits: Limits) -> None:
        self.adapters = AdapterQuota(store, limits.adapters)
        self.queued = QueueQuota(limits.queued_operations)
        self.checkpoints = CheckpointQuota(store, limits.checkpoint_bytes)
        self.samples = SamplesInFlight(settings.samples_per_tenant)
