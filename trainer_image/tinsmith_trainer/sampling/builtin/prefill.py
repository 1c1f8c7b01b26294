"""Prefill: the computation of keys and values for prompts, from the end of the longest cached prefix.

Prompts are computed one at a time and block by block if bits must not depend on other prompts, or if logits are
requested. In all other cases, several prompts share a forward, and one forward computes several blocks of a long
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tinsmith_trainer.sampling.builtin.batch import BatchPlan
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.jobs import Run, not_finite
from tinsmith_trainer.sampling.builtin.kv_cache import PromptPart, SharedPrefix
from tinsmith_trainer.sampling.builtin.prefix_cache import PrefixCache, PrefixKey, prefix_keys
from tinsmith_trainer.torch_model.vision import Vision


class Prefill:
    """A prompt without the last token, which is computed during decoding.

    Every forward has one row and one block length; the last block is padded at the end. So the bits of a block depend
    only on the tokens up to the end of the block, and not on other jobs or on cached blocks.
    """

    def __init__(
        self,
        run: Run,
        forward: ForwardPass,
        prefixes: PrefixCache[Tensor],
        plan: BatchPlan,
        shared: SharedPrefix | None = None,
    ) -> None:
        """Begin a prompt. The part of the prompt in `shared` is already computed."""
        self.run = run
        self.shared = shared
        self._forward = forward
        self._prefixes = prefixes
        self._block_tokens = block_tokens = plan.settings.prefill_block_tokens
        self._tokens = run.prefix
        self._route = plan.route_of_one(run.adapter, block_tokens, forward.modules)
        self._blocks = list(prefix_keys(run.adapter.serial, run.job.tenant, run.prefix, block_tokens))
        self.kv = forward.geometry.allocate(1, 0 if shared else len(self._blocks) * block_tokens)
        self._next_block = len(self._blocks) if shared else 0
        if shared:
            run.hit_tokens = shared.tokens
        else:
            self.take_known()

    @property
    def goes_alone(self) -> bool:
        """Return whether this prompt must have a separate forward, because it needs logits or has images."""
        return self.run.first_scored is not None

    @property
    def finished(self) -> bool:
        return self._next_block == len(self._blocks)

    @property
    def start(self) -> int:
        """The first position that is not computed."""
        return min(self._next_block * self._block_tokens, len(self._tokens))

    @property
    def left(self) -> int:
        """Return the number of tokens that are not computed yet."""
        return len(self._tokens) - self.start

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes

    @property
    def next_key(self) -> PrefixKey:
        return self._blocks[self._next_block][0]

    def part(self, tokens: int) -> PromptPart:
        """Return the next part, which has at most this many tokens: whole blocks, or all remaining tokens."""
        whole = tokens // self._block_tokens * self._block_tokens
        return PromptPart(self.kv, self.start, self.left if self.left <= tokens else whole)

    def tokens_of(self, part: PromptPart) -> torch.Tensor:
        return torch.from_numpy(self._tokens[part.start : part.end].astype(np.int64))

    def took(self, part: PromptPart) -> None:
        """Record that the part is computed. The blocks of the part are kept for later prompts."""
        while not self.finished and self._blocks[self._next_block][1] <= part.end:
            key, end = self._blocks[self._next_block]
            self._prefixes.put(key, self.kv[:, :, 0, :, self.start : end])
            self._next_block += 1

    def block_cost(self) -> float:
        """Return the cost of the next block."""
        return self._forward.cost.of(self._block_tokens, (self._next_block + 1) * self._block_tokens)

    @torch.inference_mode()
    def run_block(self) -> int:
        """Compute and cache the next block, and return the number of computed tokens.

        Raises UserError if scores are not finite.
        """
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

    def take_known(self) -> None:
        """Copy the cached blocks that come next. Positions with requested scores must still be computed."""
        first_scored = self.run.first_scored
        left = self._blocks[self._next_block :]
        usable = [key for key, end in left if first_scored is None or end < first_scored]
        start = before = self.start
        found = self._prefixes.find(usable)
        for block in found:
            self.kv[:, :, 0, :, start : start + block.shape[3]] = block
            start += block.shape[3]
        self.run.hit_tokens += start - before
        self._next_block += len(found)

    def _score(self, logits: torch.Tensor, start: int, end: int) -> None:
        """Score the tokens after the positions from `start` to `end`, beginning with the first requested token."""
        assert self.run.first_scored is not None
        skipped = max(0, self.run.first_scored - (start + 1))
        if not self.run.scores.take(start + 1 + skipped, logits[skipped : end - start]):
            raise not_finite(self.run)


class SeenPrefill(Prefill):
    """A prompt with images.

    One forward of the whole model computes the prompt from the first token, without the cache.
    """

    def __init__(
        self, run: Run, forward: ForwardPass, prefixes: PrefixCache[Tensor], plan: BatchPlan, vision: Vision
    ) -> None:
        super().__init__(run, forward, prefixes, plan)
        self._vision = vision
        self._plan = plan
        self._route = plan.route_of_one(run.adapter, len(self._tokens), forward.modules)

    @property
    @override
    def goes_alone(self) -> bool:
        return True

    @override
    def block_cost(self) -> float:
        return self._forward.cost.of(len(self._tokens), len(self._tokens))

    @override
    def take_known(self) -> None:
        """Use no cached blocks, because equal tokens may represent different images."""

    @torch.inference_mode()
    @override
    def run_block(self) -> int:
        """Compute the whole prompt. Raises UserError for a damaged image."""
        inputs = self._vision.inputs("The prompt", self._tokens, self.run.job.images)
        ids = torch.from_numpy(self._tokens.astype(np.int64)).unsqueeze(0).to(self._forward.device)
        seen = self._forward.seen(self.kv, ids, inputs, self._route)
        self.run.angle_shift = seen.angle_shift
        if self.run.first_scored is not None:
            self._score_by_blocks(seen.hidden, self.run.first_scored)
        self._next_block = len(self._blocks)
        return len(self._tokens)

    def _score_by_blocks(self, hidden: Tensor, first: int) -> None:
        """Score the prompt in blocks, so that only the logits of one block are in memory."""
        for start in range(first - 1, len(self._tokens), self._block_tokens):
            end = min(start + self._block_tokens, len(self._tokens))
            route = self._plan.route_of_one(self.run.adapter, end - start, self._forward.modules)
            self._score(self._forward.project(hidden[start:end], route), start, end)


class PromptGroup:
    """The rows of one forward, which are the next parts of several prompts of one tenant.

    Rows of one adapter are adjacent.
    """

    def __init__(self, prefills: Sequence[Prefill], tokens: int) -> None:
        """Add the part of the first prompt that fits in `tokens`, and parts of other prompts that need little padding.

        A prompt that begins with the same tokens as a prompt of the group waits. Later, the waiting prompt finds the
        common prefix in the cache.
        """
        first = prefills[0]
        self.length = first.part(tokens).length
        chosen, keys, ends = [first], {first.next_key}, [first.part(tokens).end]
        for prefill in prefills[1:]:
            is_full = (len(chosen) + 1) * self.length > tokens
            part = prefill.part(self.length)
            if is_full or prefill.next_key in keys or 2 * part.length <= self.length:
                continue
            # Each row attends to as many tokens as the longest row. Together with the end of a long prompt, short
            # prompts would take the memory of long prompts.
            if (len(ends) + 1) * max(*ends, part.end) <= 2 * (sum(ends) + part.end):
                chosen.append(prefill)
                keys.add(prefill.next_key)
                ends.append(part.end)
        self.prefills = sorted(chosen, key=lambda prefill: prefill.run.adapter.serial)
        self._parts = [prefill.part(self.length) for prefill in self.prefills]

    @property
    def tokens(self) -> int:
        """The number of tokens without padding."""
        return sum(part.length for part in self._parts)

    def cost(self, forward: ForwardPass) -> float:
        return forward.cost.of(len(self._parts) * self.length, sum(part.end for part in self._parts))

    def compute(self, forward: ForwardPass, plan: BatchPlan) -> None:
        """Compute and cache the parts."""
        ids = torch.zeros(len(self._parts), self.length, dtype=torch.long)
        for row, (prefill, part) in enumerate(zip(self.prefills, self._parts, strict=True)):
            ids[row, : part.length] = prefill.tokens_of(part)
        adapters = [prefill.run.adapter for prefill in self.prefills]
        route = plan.route_of_rows(adapters, self.length, forward.modules)
        forward.prompts(self._parts, ids.to(forward.device), route)
        for prefill, part in zip(self.prefills, self._parts, strict=True):
            prefill.took(part)
