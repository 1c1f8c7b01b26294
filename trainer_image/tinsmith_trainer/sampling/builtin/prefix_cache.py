"""Keys and values of prompt prefixes.

Prefixes are cached for later jobs within a byte limit, or shared by running samples.

The key of a prefix is the adapter version, and a digest of the tenant and of all tokens of the prefix. Tenants share no
prefixes. Answers report the number of cached tokens, so with shared prefixes, a tenant could confirm a guess of another
tenant's prompt. Prompts with a common beginning share the whole blocks of this beginning. Equal prompts also share the
tokens after the last whole block. A cached entry has the same bits as a new computation, because both are computed by
forwards of the same shape.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, Self, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_trainer.sampling.builtin.jobs import Run
from tinsmith_trainer.sampling.builtin.kv_cache import SharedPrefix

PrefixKey = tuple[int, bytes]


def prefix_keys(
    adapter_serial: int, tenant: str, tokens: NDArray[np.int32], block_tokens: int
) -> Iterator[tuple[PrefixKey, int]]:
    """Yield the end of each block, and the key of the prefix up to this end.

    The last block may be short.
    """
    digest = hashlib.blake2b(tenant.encode(), digest_size=16).digest()
    for start in range(0, len(tokens), block_tokens):
        block = tokens[start : start + block_tokens]
        digest = hashlib.blake2b(digest + block.tobytes(), digest_size=16).digest()
        yield (adapter_serial, digest), start + len(block)


class Kept(Protocol):
    """Cached values of tokens."""

    @property
    def nbytes(self) -> int: ...

    def clone(self) -> Self: ...


KeptT = TypeVar("KeptT", bound=Kept)


class PrefixCache(Generic[KeptT]):
    """A cache of blocks `[layers, 2, kv_heads, tokens, head_dim]`, or of a model's own states.

    The least recently used entry is evicted first. The cache belongs to one thread.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._blocks: OrderedDict[PrefixKey, KeptT] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def find(self, keys: list[PrefixKey]) -> list[KeptT]:
        """Return the blocks of the longest known prefix, for the keys of a prompt's consecutive blocks."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        # Later blocks are useless without the earlier ones, so the first block becomes the most recently used.
        for key in reversed(keys[: len(found)]):
            self._blocks.move_to_end(key)
        return found

    def find_last(self, keys: list[PrefixKey]) -> tuple[int, KeptT] | None:
        """Return the index and the value of the last known key."""
        for place in reversed(range(len(keys))):
            if (found := self._blocks.get(keys[place])) is not None:
                self._blocks.move_to_end(keys[place])
                return place, found
        return None

    def put(self, key: PrefixKey, block: KeptT) -> None:
        """Keep a copy of a block. Evict other blocks if the limit would be exceeded."""
        if key in self._blocks or block.nbytes > self._capacity_bytes:
            return
        while self._used_bytes + block.nbytes > self._capacity_bytes:
            self._used_bytes -= self._blocks.popitem(last=False)[1].nbytes
        self._blocks[key] = block.clone()
        self._used_bytes += block.nbytes

    def forget(self, adapter_serial: int) -> None:
        """Drop all prefixes of an adapter version."""
        for key in [key for key in self._blocks if key[0] == adapter_serial]:
            self._used_bytes -= self._blocks.pop(key).nbytes


LEAST_TOKENS, LEAST_SAMPLES = 256, 4
"""The smallest number of tokens of a shared prompt, and the smallest number of samples that share a prompt.

With fewer tokens or samples, the additional calls take longer than reading the prompt for each row.
"""

PromptKey = tuple[int, bytes]


class SharedPrefixes:
    """The prompts that running samples share. The object is used by one thread only.

    RL programs draw many samples of each prompt, in one request or in several requests. Each sample has a separate row
    for drawn tokens. Tenants share no prompts.
    """

    def __init__(self) -> None:
        self._keys: dict[int, PromptKey] = {}
        self._samples: Counter[PromptKey] = Counter()
        self._kept: WeakValueDictionary[PromptKey, SharedPrefix] = WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        return sum(prefix.kv.nbytes for prefix in self._kept.values())

    def enter(self, run: Run) -> None:
        """Count a job's samples. Samples of other jobs may have the same prompt."""
        if len(run.prefix) >= LEAST_TOKENS and not run.job.images:  # tokens do not identify images
            owner = hashlib.blake2b(run.job.tenant.encode(), digest_size=16).digest()
            digest = hashlib.blake2b(owner + run.prefix.tobytes(), digest_size=16).digest()
            self._keys[run.serial] = key = (run.adapter.serial, digest)
            self._samples[key] += run.job.num_samples

    def leave(self, run: Run) -> None:
        key = self._keys.pop(run.serial, None)
        if key is not None:
            self._samples[key] -= run.job.num_samples
            if not self._samples[key]:
                del self._samples[key]

    def shares(self, run: Run) -> bool:
        """Return whether enough samples of the job's prompt are running."""
        key = self._keys.get(run.serial)
        return key is not None and self._samples[key] >= LEAST_SAMPLES

    def known(self, run: Run) -> SharedPrefix | None:
        """Return the keys and values of the same prompt, if a running job has computed them, otherwise None."""
        return self._kept.get(self._keys[run.serial]) if run.serial in self._keys else None

    def keep(self, run: Run, kv: Tensor) -> SharedPrefix:
        """Share `kv` `[layers, 2, 1, kv_heads, at least tokens, head_dim]` as long as a sample uses `kv`."""
        prefix = self._kept[self._keys[run.serial]] = SharedPrefix(kv, len(run.prefix), run.serial)
        return prefix
