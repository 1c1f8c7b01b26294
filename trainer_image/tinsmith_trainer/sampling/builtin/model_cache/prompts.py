"""Prefill for a model's own cache: a prompt is computed block by block, or in one forward.

A prompt takes one forward if the model's layers cannot continue from states. Prompts are not padded. A state always
includes all earlier tokens of the prompt. So states are kept at only two positions: at the end of the prompt, for equal
prompts, and after the last whole block, for longer prompts.
"""

from __future__ import annotations

import numpy as np
import torch

from tinsmith_trainer.sampling.builtin.batch import BatchPlan
from tinsmith_trainer.sampling.builtin.jobs import Run, not_finite
from tinsmith_trainer.sampling.builtin.model_cache.forward import CacheForward
from tinsmith_trainer.sampling.builtin.model_cache.states import SequenceStates
from tinsmith_trainer.sampling.builtin.prefix_cache import PrefixCache, prefix_keys


class CachePrefill:
    """A prompt without the last token, which is computed during decoding.

    A block's bits depend only on the prompt's tokens.
    """

    def __init__(self, run: Run, forward: CacheForward, prefixes: PrefixCache[SequenceStates], plan: BatchPlan) -> None:
        self.run = run
        self._forward = forward
        self._prefixes = prefixes
        self._tokens = run.prefix
        self._block_tokens = plan.settings.prefill_block_tokens if forward.in_blocks else max(1, len(self._tokens))
        self._route = plan.route_of_one(run.adapter, self._block_tokens, forward.modules)
        self._blocks = list(prefix_keys(run.adapter.serial, run.job.tenant, run.prefix, self._block_tokens))
        self.kv: SequenceStates | None = None
        self.start = 0
        self._take_known()

    @property
    def goes_alone(self) -> bool:
        """Return whether this prompt shares no forward with other prompts."""
        return True

    @property
    def finished(self) -> bool:
        return self.start == len(self._tokens)

    @property
    def left(self) -> int:
        """Return the number of tokens that are not computed yet."""
        return len(self._tokens) - self.start

    @property
    def nbytes(self) -> int:
        return self._forward.geometry.row_bytes(len(self._tokens))

    def block_cost(self) -> float:
        """Return the cost of the next block."""
        tokens = min(self._block_tokens, self.left)
        return self._forward.cost.of(tokens, self.start + tokens)

    def run_block(self) -> int:
        """Compute the next block, and return the number of computed tokens.

        Raises UserError if scores are not finite.
        """
        start, end = self.start, min(self.start + self._block_tokens, len(self._tokens))
        first_scored = self.run.first_scored
        scores = first_scored is not None and end >= first_scored
        ids = torch.from_numpy(self._tokens[start:end].astype(np.int64))[None].to(self._forward.device)
        logits, self.kv = self._forward.extend(self.kv, ids, self._route, all_logits=scores)
        if scores:
            assert first_scored is not None
            skipped = max(0, first_scored - (start + 1))
            if not self.run.scores.take(start + 1 + skipped, logits[0, skipped:]):
                raise not_finite(self.run)
        self.start = end
        if len(self._tokens) - end < self._block_tokens:
            self._prefixes.put(self._blocks[start // self._block_tokens][0], self.kv)
        return end - start

    def _take_known(self) -> None:
        """Continue from known states. Positions with requested scores must still be computed."""
        first_scored = self.run.first_scored
        usable = [key for key, end in self._blocks if first_scored is None or end < first_scored]
        if (found := self._prefixes.find_last(usable)) is not None:
            place, known = found
            self.kv, self.start = known.clone(), self._blocks[place][1]
            self.run.hit_tokens = self.start
