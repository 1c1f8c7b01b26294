"""A prompt computed into a model's own cache: block by block, or all at once where its layers cannot go on from states.

Nothing is padded and nothing shared between jobs: a state is behind all of its tokens, so that those of a common
beginning would have to be kept at each of its ends.
"""

from __future__ import annotations

import numpy as np
import torch

from tinsmith_trainer.sampling.builtin.batch import BatchPlan
from tinsmith_trainer.sampling.builtin.jobs import Run, not_finite
from tinsmith_trainer.sampling.builtin.model_cache.forward import CacheForward
from tinsmith_trainer.sampling.builtin.model_cache.states import SequenceStates


class CachePrefill:
    """One prompt without its last token, which decoding feeds. A block's bits depend on the prompt's tokens alone."""

    def __init__(self, run: Run, forward: CacheForward, plan: BatchPlan) -> None:
        self.run = run
        self._forward = forward
        self._tokens = run.prefix
        self._block_tokens = plan.settings.prefill_block_tokens if forward.in_blocks else max(1, len(self._tokens))
        self._route = plan.route_of_one(run.adapter, self._block_tokens, forward.modules)
        self.kv: SequenceStates | None = None
        self.start = 0

    @property
    def goes_alone(self) -> bool:
        """Whether it shares no forward with others."""
        return True

    @property
    def finished(self) -> bool:
        return self.start == len(self._tokens)

    @property
    def left(self) -> int:
        """Tokens that are to be computed."""
        return len(self._tokens) - self.start

    @property
    def nbytes(self) -> int:
        return self._forward.geometry.row_bytes(len(self._tokens))

    def block_cost(self) -> float:
        """Of the next one."""
        tokens = min(self._block_tokens, self.left)
        return self._forward.cost.of(tokens, self.start + tokens)

    def run_block(self) -> int:
        """Computes the next block; returns its tokens. Raises UserError if scores are not finite."""
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
        return end - start
