"""A shard of a call through NeMo RL's forward and backward on one rank: Megatron's schedule, packing, context ranks.

The calls are those of `MegatronPolicyWorkerImpl._train_microbatch_body` (`nemo_rl/models/policy/workers/
megatron_policy_worker.py`) without what opens, scales and closes a step: that is `AdapterStep`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from tinsmith_trainer.engines.losses import PreparedLoss
from tinsmith_trainer.engines.nemo_rl.batches.alignment import EXTRA_COLUMNS
from tinsmith_trainer.engines.nemo_rl.batches.batch import INPUT_IDS, INPUT_LENGTHS, TARGET_IDS, Batch, rows_in
from tinsmith_trainer.engines.nemo_rl.batches.row_results import RowResults
from tinsmith_trainer.engines.nemo_rl.nemo.loss import ROWS, TinkerLoss, parallel_logprobs

SHORTEST_PACKED = 2
"""Columns: a sequence of one has no position that scores anything, and losses take maxima over positions."""


class NemoSchedule:
    """`worker` is a constructed `MegatronPolicyWorkerImpl`."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __call__(self, microbatches: Sequence[Batch], loss: PreparedLoss, *, forward_only: bool) -> list[RowResults]:
        """Every rank of a data index gets the same. The rows' results on the last pipeline stage, else none.

        Gradients are added to what the model's buffers hold, as plain sums over microbatches and context ranks. NeMo RL
        takes microbatches of one shape at a time; without stages it costs nothing to ask it several times.
        """
        shapes = groupby(microbatches, lambda batch: {name: column.shape for name, column in batch.items()})
        return [result for _, of_one in shapes for result in self._pass(list(of_one), loss, forward_only=forward_only)]

    def _pass(self, microbatches: Sequence[Batch], loss: PreparedLoss, *, forward_only: bool) -> list[RowResults]:
        from nemo_rl.models.megatron.data import get_microbatch_iterator
        from nemo_rl.models.megatron.train import LossPostProcessor, megatron_forward_backward

        worker = self._worker
        shard = _together(microbatches)
        iterator, count, rows, _, padded_length = get_microbatch_iterator(
            self._wrapped(shard),
            worker.cfg,
            rows_in(microbatches[0]),
            straggler_timer=worker.mcore_state.straggler_timer,
        )
        tinker = TinkerLoss(loss, general=TARGET_IDS in shard, logprobs=parallel_logprobs)
        metrics = megatron_forward_backward(
            model=worker.model,
            data_iterator=iterator,
            num_microbatches=count,
            seq_length=padded_length,
            mbs=rows,
            post_processing_fn=LossPostProcessor(loss_fn=tinker, cfg=worker.cfg, num_microbatches=count),
            forward_only=forward_only,
            defer_fp32_logits=worker.defer_fp32_logits,
            straggler_timer=worker.mcore_state.straggler_timer,
        )
        positions = shard[INPUT_IDS].shape[1] - EXTRA_COLUMNS
        return [_padded(result, positions) for metric in metrics or [] for result in metric[ROWS]]

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


def _together(batches: Sequence[Batch]) -> Batch:
    """NeMo RL cuts a shard into microbatches itself, of as many rows as the configuration or the caller says."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _padded(result: RowResults, positions: int) -> RowResults:
    """A packed sequence comes back without its padding; results of several are joined row by row."""
    shape = list(result.logprobs.shape)
    shape[1] = positions
    logprobs = result.logprobs.new_zeros(shape)
    logprobs[:, : result.logprobs.shape[1]] = result.logprobs
    return replace(result, logprobs=logprobs)
