"""The adapter versions in a sampler's memory, limited in number.

An adapter version is not evicted while a sample uses this version.

A version that is not in memory waits for room. The tenants with the fewest versions in use come first, and a tenant's
versions load in the order of arrival. Unused versions are evicted, the least recently used first. If all versions are
in use, the oldest versions accept no new samples until their current samples are done. So if programs use more versions
than fit, the versions take turns, and the wait of each version is limited.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import islice

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.checkpoints.checkpoint_root import SavedWeights
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.errors import OutOfMemory, UserError
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.sampling.weight_sources import WeightSources
from tinsmith_trainer.torch_model.image_files import MAX_IMAGES

log = structlog.get_logger(__name__)

RECENT_SAVE_BYTES = 1024**3
MOST_PREPARING = 2
"""The number of adapters that load without a waiting sample.

A larger number would delay adapters for which samples already wait.
"""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The limits of a sampler's memory: the number of versions, the highest rank, and the bytes of unused versions.

    The bytes of a version are the size of the tensors in the checkpoint.
    """

    max_loaded: int
    max_rank: int
    max_idle_bytes: int | None = None


@dataclass(slots=True)
class AdapterInUse:
    """An adapter version that is in memory or loading, and that samples use.

    Each user must return the version once, by `SamplerAdapters.give_back`.
    """

    key: str
    loading: asyncio.Task[None]
    users: int = 0  # its loading counts as a user
    size_bytes: int = 0
    tenants: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Waiter:
    tenant: str
    admitted: asyncio.Future[AdapterInUse]


class SamplerAdapters:
    """The adapters of one sampler, by the digests of the checkpoints' manifests. Used on one event loop."""

    def __init__(self, sampler: Sampler, sources: WeightSources, limits: AdapterLimits) -> None:
        self._sampler = sampler
        self.sources = sources
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._recent: OrderedDict[str, AdapterState] = OrderedDict()
        self._resident: OrderedDict[str, AdapterInUse] = OrderedDict()  # the oldest use is first
        self._waiting: OrderedDict[str, list[_Waiter]] = OrderedDict()
        self._preparing: set[str] = set()
        self._references: dict[str, worker_pb2.AdapterRef] = {}  # of versions with waiting samples

    def __len__(self) -> int:
        """Return the number of versions that are in memory or loading."""
        return len(self._resident)

    def remember_saved(self, saved: SavedWeights) -> None:
        """Keep weights that were just saved, so that the sampler does not read the weights from the root.

        Thread-safe.
        """
        self._loop.call_soon_threadsafe(self._keep_recent, saved)

    async def take(self, reference: worker_pb2.AdapterRef, tenant: str) -> AdapterInUse:
        """Wait until the version is in memory, and return the version.

        The version stays in memory until the tenant calls `give_back`. Raises TrainerError.
        """
        key = reference.manifest_digest
        admitted: asyncio.Future[AdapterInUse] = self._loop.create_future()
        self._waiting.setdefault(key, []).append(_Waiter(tenant, admitted))
        self._references[key] = reference
        self._admit()
        adapter = await admitted
        try:
            await asyncio.shield(adapter.loading)
        except BaseException:
            self.give_back(adapter, tenant)
            raise
        return adapter

    def prepare(self, reference: worker_pb2.AdapterRef) -> None:
        """Load an adapter before the first sample arrives, if unused room exists and no sample waits for this room.

        An adapter that no sample has used yet is evicted first. So a client that announces many adapters takes only one
        slot.
        """
        key = reference.manifest_digest
        is_busy = bool(self._waiting) or len(self._preparing) >= MOST_PREPARING
        if key in self._resident or is_busy or not self._has_room():
            return
        self._preparing.add(key)
        self._resident[key] = self._start_loading(reference)
        self._resident.move_to_end(key, last=False)
        self._resident[key].loading.add_done_callback(lambda _: self._preparing.discard(key))

    async def read_assets(self, request: worker_pb2.SampleRequest, tenant: str) -> None:
        """Read images that are files on the checkpoint root, and put the data of the images into the request.

        Raises TrainerError.
        """
        if len(request.images) > MAX_IMAGES:
            raise UserError(f"The prompt has {len(request.images)} images; {MAX_IMAGES} are the most.")
        read: dict[str, bytes] = {}
        for one in request.images:
            if one.asset and one.asset not in read:
                read[one.asset] = await asyncio.to_thread(self.sources.checkpoints.read_asset, tenant, one.asset)
            if one.asset:
                one.image.data = read[one.asset]

    def give_back(self, adapter: AdapterInUse, tenant: str) -> None:
        adapter.tenants[tenant] -= 1
        self._release(adapter)

    def _release(self, adapter: AdapterInUse) -> None:
        adapter.users -= 1
        self._drop_beyond_limit()
        self._admit()

    def _drop_beyond_limit(self) -> None:
        """Evict unused versions.

        Each RL step creates a version, so without evictions, unused versions would fill the device's memory.
        """
        if self._limits.max_idle_bytes is None:
            return
        idle = [adapter for adapter in self._resident.values() if not adapter.users]
        size = sum(adapter.size_bytes for adapter in idle)
        for adapter in idle[:-1]:  # the latest version stays, whatever its size
            if size <= self._limits.max_idle_bytes:
                return
            size -= adapter.size_bytes
            self._drop(adapter.key)

    def _admit(self) -> None:
        """Admit all waiting samples that can be admitted."""
        without_room = 0
        for key in self._in_order():
            if key in self._resident:
                # the version must leave to make room for an older waiter
                if key in islice(self._resident, without_room):
                    continue
            elif self._has_room():
                self._resident[key] = self._start_loading(self._references[key])
            else:
                without_room += 1
                continue
            self._let_in(key)

    def _in_order(self) -> list[str]:
        """Order the versions that wait for room: first by the tenant's number of used versions, then by age."""
        before = Counter(tenant for one in self._resident.values() for tenant, count in one.tenants.items() if count)
        ranks = {}
        for key, waiters in self._waiting.items():
            tenants = {waiter.tenant for waiter in waiters}
            ranks[key] = min(before[tenant] for tenant in tenants)
            before.update(tenants)
        return sorted(ranks, key=ranks.__getitem__)

    def _let_in(self, key: str) -> None:
        adapter = self._resident[key]
        self._resident.move_to_end(key)
        del self._references[key]
        for waiter in self._waiting.pop(key):
            if not waiter.admitted.done():
                adapter.users += 1
                adapter.tenants[waiter.tenant] += 1
                waiter.admitted.set_result(adapter)

    def _has_room(self) -> bool:
        """Return whether the memory has room, after evicting an unused version if necessary."""
        if len(self._resident) < self._limits.max_loaded:
            return True
        return self._drop_longest_unused()

    def _drop_longest_unused(self) -> bool:
        """Evict the unused version that was used least recently. Return False if all versions are in use."""
        idle = next((adapter.key for adapter in self._resident.values() if not adapter.users), None)
        if idle is None:
            return False
        self._drop(idle)
        return True

    def _drop(self, key: str) -> None:
        del self._resident[key]
        self._sampler.drop_adapter(key)

    def _start_loading(self, reference: worker_pb2.AdapterRef) -> AdapterInUse:
        adapter = AdapterInUse(reference.manifest_digest, self._loop.create_task(self._load(reference)), users=1)
        adapter.loading.add_done_callback(lambda loading: self._loaded(adapter, loading))
        return adapter

    def _loaded(self, adapter: AdapterInUse, loading: asyncio.Task[None]) -> None:
        if loading.cancelled() or (error := loading.exception()) is not None:
            if not loading.cancelled():
                log.warning("an adapter could not be loaded", adapter=adapter.key, error=str(error))
            del self._resident[adapter.key]  # the next request for it tries again
        self._release(adapter)

    async def _load(self, reference: worker_pb2.AdapterRef) -> None:
        key = reference.manifest_digest
        state = self._recent.pop(key, None)
        if state is None:
            state = await asyncio.to_thread(self.sources.fetch, reference)
        else:
            self.sources.note_own()
        self._check_rank(reference, state)
        while True:
            try:
                await asyncio.to_thread(self._sampler.load_adapter, key, state)
            except OutOfMemory:
                if not self._drop_longest_unused():
                    raise
            else:
                self._resident[key].size_bytes = _state_bytes(state)
                return

    def _check_rank(self, reference: worker_pb2.AdapterRef, state: AdapterState) -> None:
        if state.lora.rank > self._limits.max_rank:
            raise UserError(
                f"The checkpoint {reference.directory} holds a LoRA adapter of rank {state.lora.rank}; "
                f"this sampler's limit is {self._limits.max_rank}, its max_rank."
            )

    def _keep_recent(self, saved: SavedWeights) -> None:
        self._recent[saved.written.manifest_digest] = saved.state
        while len(self._recent) > 1 and sum(map(_state_bytes, self._recent.values())) > RECENT_SAVE_BYTES:
            self._recent.popitem(last=False)


def _state_bytes(state: AdapterState) -> int:
    return sum(tensor.nbytes for tensor in state.tensors.values())
