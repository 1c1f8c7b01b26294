"""A call's microbatches through Megatron's schedule, with or without pipeline stages.

Beside it the logprobs of targets from logits whose vocabulary is divided among tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor, nn

from tinsmith_trainer.engines.losses import PreparedLoss
from tinsmith_trainer.engines.nemo_rl.batches.batch import INPUT_IDS, Batch, scored
from tinsmith_trainer.engines.nemo_rl.batches.row_results import RowResults, row_results, total_loss

Scored = tuple[Tensor, Tensor, dict[str, Any]]


class MegatronSchedule:
    """Runs on every rank of the model alike; `chunk` is this rank's stage.

    Gradients are plain sums over tokens, rows and microbatches: `calculate_per_token_loss` keeps the schedule from
    averaging, and the count of tokens that it then asks for is 0, since nothing may be divided by it.
    """

    def __init__(self, chunk: nn.Module) -> None:
        config: Any = chunk.config
        if not config.calculate_per_token_loss:
            raise ValueError("Megatron would average over microbatches: calculate_per_token_loss is off.")
        self._chunk = chunk

    def __call__(self, microbatches: Sequence[Batch], loss: PreparedLoss, *, forward_only: bool) -> list[RowResults]:
        """One result a microbatch on the last stage, none on the others."""
        collected: list[RowResults] = []
        rows, length = microbatches[0][INPUT_IDS].shape  # stages ask each other for those of the others
        with torch.set_grad_enabled(not forward_only):
            get_forward_backward_func()(
                forward_step_func=partial(self._forward, loss=loss, collected=collected),
                data_iterator=iter(microbatches),
                model=[self._chunk],
                num_microbatches=len(microbatches),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=forward_only,
            )
        return collected

    def _forward(
        self, batches: Iterator[Batch], chunk: nn.Module, *, loss: PreparedLoss, collected: list[RowResults]
    ) -> tuple[Tensor, Callable[[Tensor], Scored]]:
        batch = next(batches)
        tokens = batch[INPUT_IDS]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        out: Tensor = chunk(tokens, positions, None)
        return out, partial(self._score, batch=batch, loss=loss, collected=collected)

    def _score(self, logits: Tensor, *, batch: Batch, loss: PreparedLoss, collected: list[RowResults]) -> Scored:
        seen = scored(batch)
        logprobs = target_logprobs(logits[:, :-1], seen.targets)
        terms = loss(logprobs, seen.inputs)
        collected.append(row_results(batch, logprobs, terms))
        return total_loss(batch, terms), torch.tensor(0, dtype=torch.int), {}


def target_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """float32 of the targets' shape, differentiable, the same on all tensor ranks.

    `logits` are this rank's part, `[B, S, V/TP]`; entries of a padded vocabulary are -inf. `targets` `[B, S]` or
    `[B, S, K]` are ids of the whole vocabulary. Each rank's gradient is that of its part.
    """
    wanted = targets if targets.ndim == logits.ndim else targets.unsqueeze(-1)
    logits = logits.float()
    found = _target_logits(logits, wanted) - _log_total(logits).unsqueeze(-1)
    return found.view(targets.shape)


def _log_total(logits: Tensor) -> Tensor:
    """log(sum(exp)) over the whole vocabulary, `[B, S]`."""
    highest = logits.detach().amax(-1)
    torch.distributed.all_reduce(
        highest, op=torch.distributed.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group()
    )
    total = (logits - highest.unsqueeze(-1)).exp().sum(-1)
    summed: Tensor = reduce_from_tensor_model_parallel_region(total)
    return summed.log() + highest


def _target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Each target's logit, from the rank that has it."""
    width = logits.shape[-1]
    own = targets - parallel_state.get_tensor_model_parallel_rank() * width
    is_here = (own >= 0) & (own < width)
    found = logits.gather(-1, own.clamp(0, width - 1))
    summed: Tensor = reduce_from_tensor_model_parallel_region(torch.where(is_here, found, 0.0))
    return summed
