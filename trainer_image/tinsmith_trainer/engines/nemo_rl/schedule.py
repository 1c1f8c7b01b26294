"""The forward and backward of a call's shard in NeMo RL on one rank: schedule, packing, context ranks and losses.

The calls are the same as in `MegatronPolicyWorkerImpl._train_microbatch_body` (`nemo_rl/models/policy/workers/
megatron_policy_worker.py`), without the parts that open, scale and close a step. `AdapterStep` opens, scales and closes
a step. Losses are called in the same way as `LossFunction` of `nemo_rl/algorithms/loss/interfaces.py`: on the ranks,
once per microbatch, or once per sequence of a packed microbatch. The scalar that a loss returns is a plain sum. NeMo RL
passes counts as divisors, which are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tinsmith_trainer.engines.losses import Inputs, Terms
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
from tinsmith_trainer.engines.megatron.step.rank import Schedule
from tinsmith_trainer.engines.megatron.step.shared_calls import Loss

ROWS = "tinsmith_rows"
"""The name of the only metric. NeMo RL does not rescale a metric with this name."""

Logprobs = Callable[[Tensor, Tensor], Tensor]
"""The type of a function from the model's output and targets `[b, S]` or `[b, S, K]` to logprobs.

The logprobs are float32 `[b, S - 1]` or `[b, S - 1, K]`, and column i scores column i + 1 of the targets.
"""


class RowList(list[RowResults]):
    """A list of results that can be summed like a metric.

    `SequencePackingLossWrapper` of `nemo_rl/algorithms/loss/wrapper.py` adds the metric of each sequence to 0.
    Tinsmith's metrics have no common length.
    """

    def __radd__(self, other: int | list[RowResults]) -> RowList:
        return RowList(self if isinstance(other, int) else [*other, *self])

    @override
    def __add__(self, other: Iterable[RowResults]) -> RowList:  # type: ignore[override]
        return RowList([*self, *other])


class TinkerLoss:
    """A loss of `losses.py` in the form that NeMo RL calls.

    NeMo RL can compute the logprobs of a shifted batch itself (`LossInputType.LOGPROB`). NeMo RL itself cannot compute
    logprobs for the targets of a general batch, or from hidden states. With `by_itself`, the loss therefore requests
    the model's output (`LossInputType.LOGIT`).
    """

    def __init__(self, compute: Callable[[Tensor, Inputs], Terms], *, by_itself: bool, logprobs: Logprobs) -> None:
        from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType

        self.loss_type = LossType.TOKEN_LEVEL  # selects a divisor in NeMo RL's own step, which never runs
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
        """Return the sum of the losses of all rows, and the results of the rows."""
        if next_token_logprobs is None:
            assert logits is not None
            next_token_logprobs = self._logprobs(logits, data[TARGET_IDS if TARGET_IDS in data else INPUT_IDS])
        terms = self._compute(next_token_logprobs, scored(data).inputs)
        return total_loss(data, terms), {ROWS: RowList([row_results(data, next_token_logprobs, terms)])}


def parallel_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute logprobs in the same way as NeMo RL for next tokens: over tensor and context ranks, in chunks."""
    if targets.ndim == 3:
        return torch.stack([parallel_logprobs(logits, own) for own in targets.unbind(-1)], dim=-1)
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
"""The smallest number of columns of a sequence.

In a sequence of one column, no position is scored, but losses take maxima over positions.
"""


@dataclass(frozen=True, slots=True)
class _Cut:
    """An iterator over NeMo RL's microbatches of one shape.

    If pipeline stages exchange shapes, the shape of the iterator is not used.
    """

    microbatches: Iterator[Any]
    count: int
    rows: int
    length: int


class NemoSchedule(Schedule):
    """A schedule on a constructed `MegatronPolicyWorkerImpl`.

    Without context ranks, the schedule calls the worker's output layer, and the model does not call this layer. Rows
    pass through NeMo RL's functions. Packed rows bypass these functions: NeMo RL's packing returns no hidden states, so
    `MegatronSchedule` runs the worker's model on them.

    For context ranks NeMo RL packs, and the model calls the output layer: NeMo RL cuts sequences out of the model's
    output, and tensor ranks would have only pieces of the hidden states.
    """

    def __init__(self, worker: Any) -> None:
        from tinsmith_trainer.engines.megatron.step.unembedding import defer_unembedding

        self._worker = worker
        self._unembedding = None if worker.cfg["sequence_packing"]["enabled"] else defer_unembedding(worker.model)

    @override
    def __call__(
        self, microbatches: Sequence[Batch], loss: Loss, *, forward_only: bool, packed: bool = False
    ) -> list[RowResults]:
        """Return the results of the rows on the last pipeline stage, and an empty list on earlier stages.

        All ranks of one data index receive the same microbatches. Gradients are added to the model's buffers, as plain
        sums over microbatches and context ranks. NeMo RL cuts microbatches of one shape out of a batch. Microbatches of
        all shapes pass through the stages in sequence.
        """
        from nemo_rl.models.megatron.train import LossPostProcessor, megatron_forward_backward

        worker = self._worker
        if packed:
            return self._packed(microbatches, loss, forward_only=forward_only)
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

    def _packed(self, microbatches: Sequence[Batch], loss: Loss, *, forward_only: bool) -> list[RowResults]:
        from tinsmith_trainer.engines.megatron.model.schedule import MegatronSchedule

        assert not self._worker.cfg["sequence_packing"]["enabled"], "NeMo RL packs for context ranks itself"
        schedule = MegatronSchedule(self._worker.model, self._unembedding)
        return schedule(microbatches, loss, forward_only=forward_only, packed=True)

    def _loss(self, loss: Loss, *, general: bool) -> TinkerLoss:
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
        """Return a `BatchedDataDict` of NeMo RL, packed if the workers' configuration requests packing."""
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        packing = self._worker.cfg["sequence_packing"]
        if not packing["enabled"]:
            return BatchedDataDict(shard)
        lengths = shard[INPUT_LENGTHS].clamp(min=SHORTEST_PACKED)
        whole = BatchedDataDict({**shard, INPUT_LENGTHS: lengths})
        # One shard, since this is one already. The packer changes the order; rows carry their datum's index.
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
    """Concatenate batches, because NeMo RL splits a shard into microbatches itself."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
