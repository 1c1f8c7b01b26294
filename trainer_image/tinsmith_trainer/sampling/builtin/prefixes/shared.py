"""Prompts whose keys and values many samples have in common, kept once as long as one of them runs.

Programs of reinforcement learning draw many samples of each prompt, by one request or by many. What a sample has drawn
itself is its row's own, and tenants share no prompt.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from weakref import WeakValueDictionary

from torch import Tensor

from tinsmith_trainer.sampling.builtin.jobs import Run
from tinsmith_trainer.sampling.builtin.kv_cache import SharedPrefix

LEAST_TOKENS, LEAST_SAMPLES = 256, 4
"""Of a prompt that is shared. For less, calls of a group's own take longer than reading the prompt for each row."""

PromptKey = tuple[int, bytes]


class SharedPrefixes:
    """Of the jobs that are under way. One thread only."""

    def __init__(self) -> None:
        self._keys: dict[int, PromptKey] = {}
        self._samples: Counter[PromptKey] = Counter()
        self._kept: WeakValueDictionary[PromptKey, SharedPrefix] = WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        return sum(prefix.kv.nbytes for prefix in self._kept.values())

    def enter(self, run: Run) -> None:
        """Counts a job's samples; those of other jobs may have the same prompt."""
        if len(run.prefix) >= LEAST_TOKENS and not run.job.images:  # which the tokens do not tell apart
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
        """Whether enough samples of its prompt are under way."""
        key = self._keys.get(run.serial)
        return key is not None and self._samples[key] >= LEAST_SAMPLES

    def known(self, run: Run) -> SharedPrefix | None:
        """What another job has computed of the same prompt, and still uses."""
        return self._kept.get(self._keys[run.serial]) if run.serial in self._keys else None

    def keep(self, run: Run, kv: Tensor) -> SharedPrefix:
        """`kv` `[layers, 2, 1, kv_heads, tokens or more, head_dim]`, as long as a sample uses it."""
        prefix = self._kept[self._keys[run.serial]] = SharedPrefix(kv, len(run.prefix), run.serial)
        return prefix
