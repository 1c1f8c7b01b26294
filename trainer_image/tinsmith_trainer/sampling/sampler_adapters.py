"""Which adapter versions are in a sampler's memory: at most so many, and none leaves while a sample uses it.

Who needs a version that is not there waits for room: tenants that use fewest go first, and each one's versions in the
order of arrival. The versions unused for longest go first; where all are in use, those taken longest ago let nobody
else in until their samples are done, so that programs with more versions than fit take turns instead of one waiting
for ever.
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
"""Adapters that are read though no sample has named them yet: more would hold up those that are waited for."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Of a sampler's memory: how many versions, the highest rank of one, and the bytes of those that nobody uses.

    Bytes are those of the checkpoint's tensors.
    """

    max_loaded: int
    max_rank: int
    max_idle_bytes: int | None = None


@dataclass(slots=True)
class AdapterInUse:
    """A version that is in memory or on its way there. Goes back to `SamplerAdapters.give_back`, once."""

    key: str
    loading: asyncio.Task[None]
    users: int = 0  # its loading is one
    size_bytes: int = 0
    tenants: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Waiter:
    tenant: str
    admitted: asyncio.Future[AdapterInUse]


class SamplerAdapters:
    """The adapters of one sampler, by the digests of their manifests. One event loop's."""

    def __init__(self, sampler: Sampler, sources: WeightSources, limits: AdapterLimits) -> None:
        self._sampler = sampler
        self.sources = sources
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._recent: OrderedDict[str, AdapterState] = OrderedDict()
        self._resident: OrderedDict[str, AdapterInUse] = OrderedDict()  # taken longest ago first
        self._waiting: OrderedDict[str, list[_Waiter]] = OrderedDict()
        self._preparing: set[str] = set()
        self._references: dict[str, worker_pb2.AdapterRef] = {}  # of those that wait

    def __len__(self) -> int:
        """How many are in memory or on their way there."""
        return len(self._resident)

    def remember_saved(self, saved: SavedWeights) -> None:
        """Weights that were just saved need not be read back. Called from any thread."""
        self._loop.call_soon_threadsafe(self._keep_recent, saved)

    async def take(self, reference: worker_pb2.AdapterRef, tenant: str) -> AdapterInUse:
        """Returns once it is in memory, where it stays until the tenant gives it back. Raises TrainerError."""
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
        """Begins to load it ahead of the samples that are about to come, in a place that nobody uses or waits for.

        Until one has come it is the first to go: who announces many and samples none takes one place from others.
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
        """Puts the data of images that are files on the checkpoint root into the request. Raises TrainerError."""
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
        """Each step of RL has a version of its own: without a limit they would fill the device and end the training."""
        if self._limits.max_idle_bytes is None:
            return
        idle = [adapter for adapter in self._resident.values() if not adapter.users]
        size = sum(adapter.size_bytes for adapter in idle)
        for adapter in idle[:-1]:  # the latest stays, whatever its size
            if size <= self._limits.max_idle_bytes:
                return
            size -= adapter.size_bytes
            self._drop(adapter.key)

    def _admit(self) -> None:
        """Lets in whoever can be."""
        without_room = 0
        for key in self._in_order():
            if key in self._resident:
                if key in islice(self._resident, without_room):  # it is to make room for somebody older
                    continue
            elif self._has_room():
                self._resident[key] = self._start_loading(self._references[key])
            else:
                without_room += 1
                continue
            self._let_in(key)

    def _in_order(self) -> list[str]:
        """Each version that is waited for stands behind what its tenant uses and behind its older ones."""
        before = Counter(tenant for one in self._resident.values() for tenant, count in one.tenants.items() if count)
        places = {}
        for key, waiters in self._waiting.items():
            tenants = {waiter.tenant for waiter in waiters}
            places[key] = min(before[tenant] for tenant in tenants)
            before.update(tenants)
        return sorted(places, key=places.__getitem__)

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
        """Makes it, where one is not in use."""
        if len(self._resident) < self._limits.max_loaded:
            return True
        return self._drop_longest_unused()

    def _drop_longest_unused(self) -> bool:
        """False: all are in use."""
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
            del self._resident[adapter.key]  # whoever asks next has it tried again
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
