"""Whether a way to compute sequences piece by piece gives what one forward over all of them gives.

Asked of every model as it is loaded: architectures have layers of many kinds, and what a cache does with them is code
of others, which goes wrong without a word. How far logits may be apart follows from how far they are where all that was
before is forgotten, so that a model's scale is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.loading import TorchModel, explain_non_finite

TOKENS = 40
PARTS = (16, 14, 7, 1, 1, 1)
"""Blocks, one behind the other, and steps."""
AT_ONCE = (37, 1, 1, 1)
TOLERANCE, TOLERANCE_IN_HALVES = 1e-4, 0.1
"""As a part of what forgetting comes to: float32 and bfloat16 round by less, a layer that forgets is beyond."""


class Trial:
    """A sequence, and the logits that a model's own forward gives it."""

    def __init__(self, torch_model: TorchModel) -> None:
        self._torch_model = torch_model
        self.ids = self.tokens()
        self._expected = self._logits(self.ids)
        if not self._expected.isfinite().all():
            raise ModelDirectoryInvalid(explain_non_finite(torch_model))
        forgetful = in_parts(lambda part, _: self._logits(part), self.ids, PARTS)
        tolerance = TOLERANCE if torch_model.model.dtype == torch.float32 else TOLERANCE_IN_HALVES
        self._most = tolerance * distance(forgetful, self._expected)

    def tokens(self, seed: int = 0) -> Tensor:
        """A sequence `[1, TOKENS]` of unlike tokens."""
        ids = (torch.arange(TOKENS) * 7 + 3 + 11 * seed) % self._torch_model.info.vocab_size
        return ids[None].to(self._torch_model.device)

    def agrees(self, found: Tensor, expected: Tensor | None = None) -> bool:
        """Of logits `[..., vocab]`; those of the sequence unless others are expected."""
        return self.apart(found, expected) <= self._most

    def apart(self, found: Tensor, expected: Tensor | None = None) -> float:
        """By how much logprobs differ, in the mean."""
        return distance(found, self._expected if expected is None else expected)

    @torch.inference_mode()
    def _logits(self, ids: Tensor) -> Tensor:
        """`[tokens, vocab]`, of one forward without a cache."""
        with self._torch_model.device_lock.held():
            logits: Tensor = self._torch_model.model(input_ids=ids, use_cache=False).logits
        return logits[0].float()


def in_parts(compute: Callable[[Tensor, int], Tensor], ids: Tensor, parts: Sequence[int]) -> Tensor:
    """Logits `[tokens, vocab]`; `compute` gets the next tokens and how many were before."""
    ends = [sum(parts[: n + 1]) for n in range(len(parts))]
    return torch.cat([compute(ids[:, end - size : end], end - size) for size, end in zip(parts, ends, strict=True)])


def distance(found: Tensor, expected: Tensor) -> float:
    """Of logprobs, in the mean; `[..., vocab]`."""
    return float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().mean())
