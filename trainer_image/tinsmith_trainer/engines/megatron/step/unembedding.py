"""Logprobs of targets from hidden states. At any time, only a part of a microbatch's logits exists.

A sequence's logits are the largest tensor of a step: for each position, as many values as the vocabulary has tokens. So
the model does not call the output layer. This module calls the layer for some positions at a time, and reduces the
logits of these positions to logprobs at once. Backward calls the layer again, which costs one to three percent of a
step, and more for the smallest models. The output layer itself is unchanged: it includes the adapter and the exchange
between tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tinsmith_trainer.engines.megatron.sharding import LOGPROB_CHUNK_TOKENS

OUTPUT_LAYER = "output_layer"


class DeferredUnembedding(nn.Module):
    """A replacement for an output layer. A call returns the input; `logprobs` calls the replaced layer later.

    If tensor ranks share the sequence, the input is this rank's piece of the sequence, and the layer gathers the
    pieces.
    """

    def __init__(self, layer: nn.Module, *, pieces: int, chunk_tokens: int = LOGPROB_CHUNK_TOKENS) -> None:
        super().__init__()
        self.layer = layer
        self._pieces = pieces
        self._chunk_tokens = chunk_tokens
        self._model_arguments: dict[str, Any] = {}

    @property
    def weight(self) -> Tensor:
        """The layer's weight, which Megatron accesses."""
        weight: Tensor = self.layer.weight  # type: ignore[assignment]
        return weight

    @override
    def forward(self, hidden: Tensor, **model_arguments: Any) -> tuple[Tensor, None]:
        """Return the input.

        The model passes the same further arguments in each call; a model with tied embeddings also passes the weight.
        """
        self._model_arguments = model_arguments
        return hidden, None

    def logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return float32 logprobs in the targets' shape, differentiable, and equal on all tensor ranks.

        `hidden` `[B, S / pieces, H]` is the model's output. `targets`, `[B, S']` or `[B, S', K]` with S' up to S, are
        the targets of the first S' positions.
        """
        states = hidden.transpose(0, 1)
        length, rows = states.shape[:2]
        targets_by_piece = self._by_piece(targets, length)
        positions = max(1, self._chunk_tokens // (rows * self._pieces))
        saves = torch.is_grad_enabled() and length > positions
        score = _computed_again(self._score) if saves else self._score
        parts = [
            score(states[start : start + positions], targets_by_piece[:, start : start + positions])
            for start in range(0, length, positions)
        ]
        found = torch.cat(parts, dim=1).flatten(0, 1).transpose(0, 1)
        return found[:, : targets.shape[1]].reshape(targets.shape)

    def _by_piece(self, targets: Tensor, length: int) -> Tensor:
        """Return the targets as `[pieces, S / pieces, B, K]`, with token 0 for positions without a target."""
        columns = targets if targets.ndim == 3 else targets.unsqueeze(-1)
        rows, length_with_targets, several = columns.shape
        whole = columns.new_zeros(self._pieces * length, rows, several)
        whole[:length_with_targets] = columns.transpose(0, 1)
        return whole.view(self._pieces, length, rows, several)

    def _score(self, states: Tensor, targets: Tensor) -> Tensor:
        """Return the logprobs of `targets` `[pieces, s, B, K]`, in this shape, from the pieces' states `[s, B, H]`."""
        logits, _ = self.layer(states, **self._model_arguments)
        return target_logprobs(logits, targets.flatten(0, 1).to(logits.device)).view(targets.shape)


def _computed_again(score: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def recomputed(states: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = checkpoint(score, states, targets, use_reentrant=False, preserve_rng_state=False)
        return found

    return recomputed


def defer_unembedding(model: nn.Module, *, chunk_tokens: int = LOGPROB_CHUNK_TOKENS) -> DeferredUnembedding | None:
    """Change the model in place, so that the last pipeline stage returns hidden states.

    Return None on other stages.
    """
    for path, module in model.named_modules():
        owner, _, name = path.rpartition(".")
        if name == OUTPUT_LAYER and module is not None:
            config: Any = model.config
            pieces = config.tensor_model_parallel_size if config.sequence_parallel else 1
            deferred = DeferredUnembedding(module, pieces=pieces, chunk_tokens=chunk_tokens)
            setattr(model.get_submodule(owner), name, deferred)
            return deferred
    return None


def target_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return float32 logprobs in the targets' shape, differentiable, and equal on all tensor ranks.

    `logits` `[B, S, V/TP]` are this rank's part; entries of a padded vocabulary are -inf. `targets` `[B, S]` or `[B, S,
    K]` are ids of the whole vocabulary. The gradient on each rank is the gradient of the rank's part of the logits.
    """
    columns = targets if targets.ndim == logits.ndim else targets.unsqueeze(-1)
    logits = logits.float()
    found = _target_logits(logits, columns) - _log_total(logits).unsqueeze(-1)
    return found.view(targets.shape)


def _log_total(logits: Tensor) -> Tensor:
    """Return log(sum(exp)) over the whole vocabulary, `[B, S]`."""
    highest = logits.detach().amax(-1)
    torch.distributed.all_reduce(
        highest, op=torch.distributed.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group()
    )
    total = (logits - highest.unsqueeze(-1)).exp().sum(-1)
    summed: Tensor = reduce_from_tensor_model_parallel_region(total)
    return summed.log() + highest


def _target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the logit of each target. Only one tensor rank has this logit before the exchange."""
    width = logits.shape[-1]
    own = targets - parallel_state.get_tensor_model_parallel_rank() * width
    is_here = (own >= 0) & (own < width)
    found = logits.gather(-1, own.clamp(0, width - 1))
    summed: Tensor = reduce_from_tensor_model_parallel_region(torch.where(is_here, found, 0.0))
    return summed
