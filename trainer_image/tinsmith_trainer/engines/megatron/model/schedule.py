"""Megatron's schedule of a call's microbatches, with or without pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn
from typing_extensions import override

from tinsmith_trainer.engines.megatron.batch import INPUT_IDS, Batch, RowResults, row_results, scored, total_loss
from tinsmith_trainer.engines.megatron.model.packed_rows import PackedRows
from tinsmith_trainer.engines.megatron.step.rank import Schedule
from tinsmith_trainer.engines.megatron.step.shared_calls import Loss
from tinsmith_trainer.engines.megatron.step.unembedding import DeferredUnembedding

Scored = tuple[Tensor, Tensor, dict[str, Any]]


class MegatronSchedule(Schedule):
    """A schedule that runs in the same way on every rank of the model.

    `chunk` is this rank's stage. The schedule calls the output layer of the stage, which `defer_unembedding` returns,
    and the model itself does not call this layer. Gradients are plain sums over tokens, rows and microbatches.
    `calculate_per_token_loss` disables averaging. Without averaging, Megatron requires a token count; with a count of
    0, nothing is divided.
    """

    def __init__(self, chunk: nn.Module, unembedding: DeferredUnembedding | None) -> None:
        config: Any = chunk.config
        if not config.calculate_per_token_loss:
            raise ValueError("Megatron would average over microbatches: calculate_per_token_loss is off.")
        self._chunk = chunk
        self._precision = _precision(chunk)
        self._device = next(chunk.parameters()).device
        self._unembedding = unembedding
        self._pieces = config.tensor_model_parallel_size if config.sequence_parallel else 1

    @override
    def __call__(
        self, microbatches: Sequence[Batch], loss: Loss, *, forward_only: bool, packed: bool = False
    ) -> list[RowResults]:
        """Return one result per microbatch on the last stage, and an empty list on earlier stages."""
        collected: list[RowResults] = []
        rows, length = microbatches[0][INPUT_IDS].shape  # stages send each other the shapes of all microbatches
        with torch.set_grad_enabled(not forward_only):
            get_forward_backward_func()(
                forward_step_func=partial(self._forward, loss=loss, collected=collected, packed=packed),
                data_iterator=iter(microbatches),
                model=[self._chunk],
                num_microbatches=len(microbatches),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=forward_only,
            )
        return collected

    def _forward(
        self, batches: Iterator[Batch], chunk: nn.Module, *, loss: Loss, collected: list[RowResults], packed: bool
    ) -> tuple[Tensor, Callable[[Tensor], Scored]]:
        on_host = next(batches)
        batch = {name: column.to(self._device) for name, column in on_host.items()}
        rows = PackedRows.of(on_host, multiple_of=self._pieces, device=self._device) if packed else None
        out: Tensor = chunk(*self._inputs(batch, rows), **self._precision, **_packing(rows))
        return out, partial(self._score, batch=batch, rows=rows, loss=loss, collected=collected)

    def _inputs(self, batch: Batch, rows: PackedRows | None) -> tuple[Tensor, Tensor, None]:
        """Return tokens, positions, and no mask, because attention is causal."""
        if rows is not None:
            return rows.tokens, rows.positions, None
        tokens = batch[INPUT_IDS]
        return tokens, torch.arange(tokens.shape[1], device=self._device).expand_as(tokens), None

    def _score(
        self, hidden: Tensor, *, batch: Batch, rows: PackedRows | None, loss: Loss, collected: list[RowResults]
    ) -> Scored:
        assert self._unembedding is not None, "only the last stage has logprobs"
        seen = scored(batch)
        if rows is None:
            logprobs = self._unembedding.logprobs(hidden, seen.targets)
        else:
            packed = self._unembedding.logprobs(hidden, rows.packed(seen.targets))
            logprobs = rows.in_rows(packed, seen.targets)
        terms = loss(logprobs, seen.inputs)
        collected.append(row_results(batch, logprobs, terms))
        return total_loss(batch, terms), torch.tensor(0, dtype=torch.int), {}


def _precision(chunk: Any) -> dict[str, bool]:
    """Return options that keep hidden states in half precision, as the output layer requires."""
    return {"fp32_output": False} if isinstance(chunk.module, Float16Module) else {}


def _packing(rows: PackedRows | None) -> dict[str, Any]:
    return {} if rows is None else {"packed_seq_params": rows.parameters()}
