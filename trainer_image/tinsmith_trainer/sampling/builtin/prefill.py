"""Computes a prompt's keys and values block by block, from the longest known prefix on."""

from __future__ import annotations

import numpy as np
import torch

from tinsmith_trainer.sampling.builtin.batch import BatchPlan
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.jobs import Run, not_finite
from tinsmith_trainer.sampling.builtin.prefix_cache import PrefixCache, prefix_keys


class Prefill:
    """One prompt without its last token, which decoding feeds.

    Every block has the same length, the last one padded behind its end, and one row. So a block's
    bits depend on the tokens up to its end only: not on other jobs, nor on what was cached.
    """

    def __init__(self, run: Run, forward: ForwardPass, prefixes: PrefixCache, plan: BatchPlan) -> None:
        self.run = run
        self._forward = forward
        self._prefixes = prefixes
        self._block_tokens = block_tokens = plan.settings.prefill_block_tokens
        self._tokens = run.prefix
        self._route = plan.route_of_one(run.adapter, block_tokens, forward.modules)
        self._blocks = list(prefix_keys(run.adapter.serial, run.prefix, block_tokens))
        self.kv = forward.geometry.allocate(1, len(self._blocks) * block_tokens)
        self._next_block = self._take_known()

    @property
    def finished(self) -> bool:
        return self._next_block == len(self._blocks)

    def block_cost(self) -> float:
        """Of the next one."""
        return self._forward.cost.of(self._block_tokens, (self._next_block + 1) * self._block_tokens)

    @torch.inference_mode()
    def run_block(self) -> int:
        """Computes and caches the next block; returns its tokens. Raises UserError if scores are not finite."""
        key, end = self._blocks[self._next_block]
        start = self._next_block * self._block_tokens
        ids = torch.zeros(1, self._block_tokens, dtype=torch.long)
        ids[0, : end - start] = torch.from_numpy(self._tokens[start:end].astype(np.int64))
        scores = self.run.first_scored is not None and end >= self.run.first_scored
        logits = self._forward.block(self.kv, ids.to(self._forward.device), start, self._route, all_logits=scores)
        if scores:
            self._score(logits, start, end)
        self._prefixes.put(key, self.kv[:, :, 0, :, start:end])
        self._next_block += 1
        return end - start

    def _take_known(self) -> int:
        """Copies cached blocks in; returns how many. Positions to be scored must be computed."""
        first_scored = self.run.first_scored
        usable = [key for key, end in self._blocks if first_scored is None or end < first_scored]
        start = 0
        found = self._prefixes.find(usable)
        for block in found:
            self.kv[:, :, 0, :, start : start + block.shape[3]] = block
            start += block.shape[3]
        self.run.hit_tokens = start
        return len(found)

    def _score(self, logits: torch.Tensor, start: int, end: int) -> None:
        """What was asked about the tokens that follow positions start to end; nothing before the first of them."""
        assert self.run.first_scored is not None
        skipped = max(0, self.run.first_scored - (start + 1))
        if not self.run.scores.take(start + 1 + skipped, logits[skipped : end - start]):
            raise not_finite(self.run)
