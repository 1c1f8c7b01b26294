"""Tinker's losses as NeMo RL calls a loss: `LossFunction` of `nemo_rl/algorithms/loss/interfaces.py`.

Made and called on the ranks, once per microbatch, or once per sequence of a packed one. Its scalar is a plain sum,
divided by nothing, and the counts that NeMo RL offers to divide it by are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tinsmith_trainer.engines.losses import Inputs, Terms
from tinsmith_trainer.engines.megatron.batches.batch import INPUT_IDS, TARGET_IDS, scored
from tinsmith_trainer.engines.megatron.batches.row_results import RowResults, row_results, total_loss
from tinsmith_trainer.engines.megatron.batches.sharding import LOGPROB_CHUNK_TOKENS

ROWS = "tinsmith_rows"
"""The one metric. Those that NeMo RL knows by name, or by an ending, it rescales."""

Logprobs = Callable[[Tensor, Tensor], Tensor]
"""Of targets `[b, S]` or `[b, S, K]` under what the model gave: float32 `[b, S - 1]` or `[b, S - 1, K]`, where column i
scores column i + 1 of the targets."""


class RowList(list[RowResults]):
    """A metric that may be summed: `SequencePackingLossWrapper` of `nemo_rl/algorithms/loss/wrapper.py` starts from 0
    and adds each sequence's, and these have no common length."""

    def __radd__(self, other: int | list[RowResults]) -> RowList:
        return RowList(self if isinstance(other, int) else [*other, *self])

    @override
    def __add__(self, other: Iterable[RowResults]) -> RowList:  # type: ignore[override]
        return RowList([*self, *other])


class TinkerLoss:
    """`compute` is one of `losses.py`'s, by a call's name and config.

    NeMo RL can compute a shifted batch's logprobs itself (`LossInputType.LOGPROB`). A general one's targets it does not
    know, nor what to do with hidden states: with `by_itself` this asks for what the model gave (`LossInputType.LOGIT`).
    """

    def __init__(self, compute: Callable[[Tensor, Inputs], Terms], *, by_itself: bool, logprobs: Logprobs) -> None:
        from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType

        self.loss_type = LossType.TOKEN_LEVEL  # picks a denominator of NeMo RL's own step, which never runs
        self.input_type = LossInputType.LOGIT if by_itself else LossInputType.LOGPROB
        self._compute = compute
        self._logprobs = logprobs

    def __call__(
        self,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        *,
        next_token_logprobs: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The sum of the rows' losses, and what each was made from."""
        if next_token_logprobs is None:
            assert logits is not None
            next_token_logprobs = self._logprobs(logits, data[TARGET_IDS if TARGET_IDS in data else INPUT_IDS])
        terms = self._compute(next_token_logprobs, scored(data).inputs)
        return total_loss(data, terms), {ROWS: RowList([row_results(data, next_token_logprobs, terms)])}


def parallel_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """As NeMo RL's own for the tokens after: vocabulary over tensor ranks, sequence over context ranks, in chunks."""
    if targets.ndim == 3:
        return torch.stack([parallel_logprobs(logits, one) for one in targets.unbind(-1)], dim=-1)
    from megatron.core import parallel_state
    from nemo_rl.distributed.model_utils import (
        get_next_token_logprobs_from_logits,
    )

    found: Tensor = get_next_token_logprobs_from_logits(
        input_ids=targets,
        next_token_logits=logits,
        vocab_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        vocab_parallel_group=parallel_state.get_tensor_model_parallel_group(),
        context_parallel_group=parallel_state.get_context_parallel_group(),
        chunk_size=LOGPROB_CHUNK_TOKENS,
    )
    return found
