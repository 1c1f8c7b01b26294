"""A shard of a call through NeMo RL's forward and backward on one rank: Megatron's schedule, packing, context ranks.

The calls are those of `MegatronPolicyWorkerImpl._train_microbatch_body` (`nemo_rl/models/policy/workers/
megatron_policy_worker.py`) without what opens, scales and closes a step: that is `AdapterStep`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tinsmith_trainer.engines.losses import Inputs, PreparedLoss, Terms
from tinsmith_trainer.engines.megatron.batch import (
    EXTRA_COLUMNS,
    INPUT_IDS,
    INPUT_LENGTHS,
    TARGET_IDS,
    Batch,
    RowResults,
    row_results,
    rows_in,
    scored,
    total_loss,
)
from tinsmith_trainer.engines.megatron.sharding import LOGPROB_CHUNK_TOKENS

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


SHORTEST_PACKED = 2
"""Columns: a sequence of one has no position that scores anything, and losses take maxima over positions."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Microbatches of one shape as NeMo RL hands them out. Where stages ask for each shape, none need be said."""

    microbatches: Iterator[Any]
    count: int
    rows: int
    length: int


class NemoSchedule:
    """`worker` is a constructed `MegatronPolicyWorkerImpl`, whose model's output layer is called from here on.

    But with packing, where NeMo RL cuts sequences out of what the model gave: tensor ranks would have pieces of them.
    """

    def __init__(self, worker: Any) -> None:
        from tinsmith_trainer.engines.megatron.step.unembedding import defer_unembedding

        self._worker = worker
        self._unembedding = None if worker.cfg["sequence_packing"]["enabled"] else defer_unembedding(worker.model)

    def __call__(self, microbatches: Sequence[Batch], loss: PreparedLoss, *, forward_only: bool) -> list[RowResults]:
        """Every rank of a data index gets the same. The rows' results on the last pipeline stage, else none.

        Gradients are added to what the model's buffers hold, as plain sums over microbatches and context ranks. NeMo RL
        cuts microbatches of one shape out of a batch; those of all shapes go through the stages one behind the other.
        """
        from nemo_rl.models.megatron.train import LossPostProcessor, megatron_forward_backward

        worker = self._worker
        cuts = [self._cut(list(of_one)) for _, of_one in groupby(microbatches, _shapes)]
        count = sum(cut.count for cut in cuts)
        tinker = self._loss(loss, general=TARGET_IDS in microbatches[0])
        metrics = megatron_forward_backward(
            model=worker.model,
            data_iterator=chain.from_iterable(cut.microbatches for cut in cuts),
            num_microbatches=count,
            seq_length=cuts[0].length,
            mbs=cuts[0].rows,
            post_processing_fn=LossPostProcessor(loss_fn=tinker, cfg=worker.cfg, num_microbatches=count),
            forward_only=forward_only,
            defer_fp32_logits=worker.defer_fp32_logits,
            straggler_timer=worker.mcore_state.straggler_timer,
        )
        return [result for metric in metrics or [] for result in metric[ROWS]]

    def _loss(self, loss: PreparedLoss, *, general: bool) -> TinkerLoss:
        unembedding = self._unembedding
        if unembedding is None:
            return TinkerLoss(loss, by_itself=general, logprobs=parallel_logprobs)
        return TinkerLoss(
            loss,
            by_itself=True,
            logprobs=lambda hidden, targets: unembedding.logprobs(hidden, targets[:, EXTRA_COLUMNS:]),
        )

    def _cut(self, microbatches: Sequence[Batch]) -> _Cut:
        from nemo_rl.models.megatron.data import get_microbatch_iterator

        iterator, count, rows, _, padded_length = get_microbatch_iterator(
            self._wrapped(_together(microbatches)),
            self._worker.cfg,
            rows_in(microbatches[0]),
            straggler_timer=self._worker.mcore_state.straggler_timer,
        )
        return _Cut(iterator, count, rows, padded_length)

    def _wrapped(self, shard: Batch) -> Any:
        """NeMo RL's `BatchedDataDict`, cut into packed microbatches where the workers' configuration says so."""
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        packing = self._worker.cfg["sequence_packing"]
        if not packing["enabled"]:
            return BatchedDataDict(shard)
        lengths = shard[INPUT_LENGTHS].clamp(min=SHORTEST_PACKED)
        whole = BatchedDataDict({**shard, INPUT_LENGTHS: lengths})
        # Into one shard, since this is one already. Its order is the packer's; rows know their datum.
        (packed,), _ = whole.shard_by_batch_size(
            1,
            sequence_packing_args={
                "max_tokens_per_microbatch": packing["train_mb_tokens"],
                "algorithm": packing["algorithm"],
                "input_key": INPUT_IDS,
                "input_lengths_key": INPUT_LENGTHS,
                "sequence_length_pad_multiple": self._worker.cfg["make_sequence_length_divisible_by"],
            },
        )
        return packed


def _shapes(batch: Batch) -> dict[str, torch.Size]:
    return {name: column.shape for name, column in batch.items()}


def _together(batches: Sequence[Batch]) -> Batch:
    """NeMo RL cuts a shard into microbatches itself, of as many rows as the configuration or the caller says."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
