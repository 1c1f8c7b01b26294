"""What ranks found out about rows, and the way back to the caller's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tinsmith_trainer.engines.base import Datum
from tinsmith_trainer.engines.losses import DatumResult, Terms
from tinsmith_trainer.engines.megatron.batches.alignment import TARGETS, width
from tinsmith_trainer.engines.megatron.batches.batch import NO_ROW, ROW_ID, SAMPLE_MASK
from tinsmith_trainer.errors import ServerError


@dataclass(frozen=True, slots=True)
class RowResults:
    """Of n rows in any order, detached CPU tensors: they are pickled on their way to the driver.

    `row_id` int64 `[n]`, `logprobs` float32 `[n, S']` or `[n, S', K]`, `losses` and each of `metrics` float32 `[n]`.
    Row ids below 0 are rows that filled up.
    """

    row_id: Tensor
    logprobs: Tensor
    losses: Tensor
    metrics: Mapping[str, Tensor]


def total_loss(batch: Mapping[str, Tensor], terms: Terms) -> Tensor:
    """The sum over a microbatch's rows that backward starts from. Rows that fill up count for nothing."""
    rows: Tensor = terms.loss.flatten(1).sum(1)
    return (rows * batch[SAMPLE_MASK].to(rows.device)).sum()


def row_results(batch: Mapping[str, Tensor], logprobs: Tensor, terms: Terms) -> RowResults:
    """What a microbatch's loss was and was made from, taken off the device and out of autograd."""
    return RowResults(
        row_id=batch[ROW_ID].cpu(),
        logprobs=_plain(logprobs),
        losses=_plain(terms.loss.flatten(1).sum(1)),
        metrics={name: _plain(values) for name, values in terms.metrics.items()},
    )


def _plain(values: Tensor) -> Tensor:
    return values.detach().float().cpu()


def gather(results: Sequence[RowResults], datums: Sequence[Datum]) -> list[DatumResult]:
    """Each datum's, in the caller's order, without padding. Raises ServerError unless each comes exactly once."""
    found: dict[int, DatumResult] = {}
    for part in results:
        for row, index in enumerate(part.row_id.tolist()):
            if index == NO_ROW:
                continue
            if index in found or not 0 <= index < len(datums):
                raise ServerError(
                    f"The ranks returned row {index} of {len(datums)} twice, or it is none of the call's."
                )
            found[index] = _of_datum(part, row, datums[index])
    if missing := [index for index in range(len(datums)) if index not in found]:
        raise ServerError(f"The ranks returned nothing for rows {missing} of {len(datums)}.")
    return [found[index] for index in range(len(datums))]


def _of_datum(part: RowResults, row: int, datum: Datum) -> DatumResult:
    targets = datum.loss_inputs[TARGETS]
    logprobs = part.logprobs[row, : datum.length]
    if part.logprobs.ndim == 3:
        wide = width(targets)
        logprobs = logprobs[:, 0] if wide is None else logprobs[:, :wide]
    return DatumResult(
        logprobs=logprobs.numpy().copy(),
        loss=float(part.losses[row]),
        metrics={name: float(values[row]) for name, values in part.metrics.items()},
    )
