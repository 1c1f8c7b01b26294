"""A shard of a call through NeMo RL's forward and backward on one rank: Megatron's schedule, packing, context ranks.

The calls are those of `MegatronPolicyWorkerImpl._train_microbatch_body` (`nemo_rl/models/policy/workers/
megatron_policy_worker.py`) without what opens, scales and closes a step: that is `AdapterStep`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch

from tinsmith_trainer.engines.losses import PreparedLoss
from tinsmith_trainer.engines.megatron.batches.alignment import EXTRA_COLUMNS
from tinsmith_trainer.engines.megatron.batches.batch import INPUT_IDS, INPUT_LENGTHS, TARGET_IDS, Batch, rows_in
from tinsmith_trainer.engines.megatron.batches.row_results import RowResults
from tinsmith_trainer.engines.nemo_rl.loss import ROWS, TinkerLoss, parallel_logprobs

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
