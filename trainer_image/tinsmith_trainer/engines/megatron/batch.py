"""Conversion of a call's datums to a batch of tensors with right padding, and of the ranks' results back to datums.

A datum of Tinker has tokens `x[0..T-1]` and targets `t[0..T-1]`; `t[i]` is scored at position i. NeMo RL scores `t[i]`
in column i + 1 of a batch. So each per-token value is written one column further to the right, and a datum of T tokens
becomes a row of T + 1 columns. In most training data, the targets are the tokens shifted by one position. In a
*shifted* batch, the last target fills the additional column, and no separate targets are sent. In a *general* batch,
the additional column holds a token that no scored position sees, and the targets are a separate tensor.

A batch is a dict of torch tensors on the CPU, with rows in dimension 0 and the sequence in dimension 1. NeMo RL's
workers read the same names, and NeMo RL's `BatchedDataDict` wraps the dict unchanged.

| Key | Shape, type | Content |
|---|---|---|
| `input_ids` | `[b, S]` int64 | tokens, followed by the last target in a shifted batch |
| `input_lengths` | `[b]` int64 | columns that are not padding |
| `token_mask` | `[b, S]` float32 | 1 where a target is scored |
| `sample_mask` | `[b]` float32 | 1, and 0 in padding rows |
| `row_id` | `[b]` int64 | the datum's index in the call, and -1 in padding rows |
| `target_ids` | `[b, S]` or `[b, S, K]` int64 | only in a general batch |
| `loss/<input>` | as the targets, float32 | the loss's inputs |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_trainer.engines.base import Datum
from tinsmith_trainer.engines.losses import VALID, DatumResult, LossArrays, Terms
from tinsmith_trainer.errors import ServerError

TARGETS = "target_tokens"
EXTRA_COLUMNS = 1
UNSEEN_TOKEN = 0

Values = NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32]


def is_shifted(datum: Datum) -> bool:
    """Return whether each token except the first token is the target of the previous token."""
    targets = datum.loss_inputs[TARGETS]
    return targets.ndim == 1 and bool(np.array_equal(targets[:-1], datum.tokens[1:]))


def all_shifted(datums: Sequence[Datum]) -> bool:
    """Return whether all datums are shifted.

    If one datum is not shifted, the whole call is general, because all batches of a call have equal columns.
    """
    return all(is_shifted(datum) for datum in datums)


def row_length(datum: Datum) -> int:
    """Return the number of columns of the datum's row, without padding."""
    return datum.length + EXTRA_COLUMNS


def row_tokens(datum: Datum, *, shifted: bool) -> Tensor:
    """Return the model's input for one row, int64 `[T + 1]`."""
    last = datum.loss_inputs[TARGETS][-1] if shifted else UNSEEN_TOKEN
    return torch.from_numpy(np.append(datum.tokens, last).astype(np.int64))


def write_right(row: Tensor, values: Values) -> None:
    """Write values `[T]` or `[T, k]` one column to the right, into a row `[S]` or `[S, K]` with K at least k."""
    tensor = torch.from_numpy(np.array(values))  # a copy, because a client's array may be read-only
    if row.ndim == 2:
        row[EXTRA_COLUMNS : EXTRA_COLUMNS + len(tensor), : width(values) or 1] = tensor.reshape(len(tensor), -1)
    else:
        row[EXTRA_COLUMNS : EXTRA_COLUMNS + len(tensor)] = tensor


def read_right(column: Tensor) -> Tensor:
    """Return the scored part of a column `[b, S]` or `[b, S, K]`, in which position i is position i of a datum."""
    return column[:, EXTRA_COLUMNS:]


def read_left(column: Tensor) -> Tensor:
    """Return the part of a column `[b, S]` in which position i is input of the logprob at position i."""
    return column[:, :-EXTRA_COLUMNS]


def width(values: Values) -> int | None:
    """Return K for a shape `[T, K]`, and None for a shape `[T]`."""
    return values.shape[1] if values.ndim == 2 else None


Batch = dict[str, Tensor]

INPUT_IDS, INPUT_LENGTHS = "input_ids", "input_lengths"
TOKEN_MASK, SAMPLE_MASK = "token_mask", "sample_mask"
ROW_ID, TARGET_IDS = "row_id", "target_ids"
LOSS_PREFIX = "loss/"
NO_ROW = -1


@dataclass(frozen=True, slots=True)
class Scored:
    """The data of a batch that a loss uses. Position i, of S' = S - 1 positions, is position i of a datum.

    `targets` are int64 `[b, S']` or `[b, S', K]`. `inputs` are the inputs of the loss, in the same shape, and `valid`
    is bool `[b, S']`. The logits at position i give the logprobs of the targets at position i.
    """

    targets: Tensor
    inputs: Mapping[str, Tensor]


def encode(
    datums: Sequence[Datum], loss_arrays: Sequence[LossArrays], *, multiple_of: int = 1, shifted: bool | None = None
) -> Batch:
    """Encode one row per datum, in order. All rows have the same length, which is a multiple of `multiple_of`.

    `shifted` is the value of `all_shifted` for the whole call, because all batches of a call have equal columns. If
    `shifted` is None, `encode` computes the value from `datums`. `loss_arrays` are the arrays of a PreparedLoss: every
    datum has arrays with the same names, in the shape of the datum's targets. If datums differ in the number of targets
    per position, all datums get the largest number. The added targets have no weight.
    """
    columns = -(-max(row_length(datum) for datum in datums) // multiple_of) * multiple_of
    shifted = all_shifted(datums) if shifted is None else shifted
    batch = {
        INPUT_IDS: torch.zeros(len(datums), columns, dtype=torch.int64),
        INPUT_LENGTHS: torch.tensor([row_length(datum) for datum in datums]),
        TOKEN_MASK: torch.zeros(len(datums), columns),
        SAMPLE_MASK: torch.ones(len(datums)),
        ROW_ID: torch.arange(len(datums)),
    }
    for row, datum in enumerate(datums):
        batch[INPUT_IDS][row, : row_length(datum)] = row_tokens(datum, shifted=shifted)
        batch[TOKEN_MASK][row, EXTRA_COLUMNS : row_length(datum)] = 1
    if not shifted:
        batch[TARGET_IDS] = _column([datum.loss_inputs[TARGETS] for datum in datums], columns, torch.int64)
    for name in loss_arrays[0]:
        batch[LOSS_PREFIX + name] = _column([arrays[name] for arrays in loss_arrays], columns, torch.float32)
    return batch


def _column(rows: Sequence[Values], columns: int, dtype: torch.dtype) -> Tensor:
    """Return a column, with zeros for padding, and for targets that only other rows have."""
    widest = max((width(values) or 0 for values in rows), default=0)
    shape = (len(rows), columns, widest) if widest else (len(rows), columns)
    column = torch.zeros(shape, dtype=dtype)
    for row, values in enumerate(rows):
        write_right(column[row], values)
    return column


def scored(batch: Mapping[str, Tensor]) -> Scored:
    """Return the data that a loss uses, from a shifted or a general batch."""
    inputs = {
        name.removeprefix(LOSS_PREFIX): read_right(column)
        for name, column in batch.items()
        if name.startswith(LOSS_PREFIX)
    }
    targets = batch[TARGET_IDS] if TARGET_IDS in batch else batch[INPUT_IDS]
    return Scored(read_right(targets), inputs | {VALID: read_right(batch[TOKEN_MASK]) > 0})


def rows_in(batch: Mapping[str, Tensor]) -> int:
    return len(batch[ROW_ID])


def packed_lengths(batch: Mapping[str, Tensor]) -> list[int]:
    """Return the length of each row as a packed sequence: its scored positions, and at least one."""
    lengths: list[int] = (batch[INPUT_LENGTHS] - EXTRA_COLUMNS).clamp(min=1).tolist()
    return lengths


def take(batch: Mapping[str, Tensor], rows: Tensor) -> Batch:
    """Return a copy of the rows with these indices, in this order."""
    return {name: column[rows] for name, column in batch.items()}


@dataclass(frozen=True, slots=True)
class RowResults:
    """Results of n rows in any order.

    All tensors are detached and on the CPU, because the results are pickled for the driver.

    `row_id` int64 `[n]`, `logprobs` float32 `[n, S']` or `[n, S', K]`, `losses` and each of `metrics` float32 `[n]`.
    Row ids below 0 are padding rows.
    """

    row_id: Tensor
    logprobs: Tensor
    losses: Tensor
    metrics: Mapping[str, Tensor]


def total_loss(batch: Mapping[str, Tensor], terms: Terms) -> Tensor:
    """Return the sum of a microbatch's losses, from which backward starts. Padding rows add 0."""
    rows: Tensor = terms.loss.flatten(1).sum(1)
    return (rows * batch[SAMPLE_MASK].to(rows.device)).sum()


def row_results(batch: Mapping[str, Tensor], logprobs: Tensor, terms: Terms) -> RowResults:
    """Return a microbatch's results, detached and on the CPU."""
    return RowResults(
        row_id=batch[ROW_ID].cpu(),
        logprobs=_plain(logprobs),
        losses=_plain(terms.loss.flatten(1).sum(1)),
        metrics={name: _plain(values) for name, values in terms.metrics.items()},
    )


def _plain(values: Tensor) -> Tensor:
    return values.detach().float().cpu()


def gather(results: Sequence[RowResults], datums: Sequence[Datum]) -> list[DatumResult]:
    """Return each datum's result in order, without padding. Raises ServerError unless each datum occurs once."""
    found: dict[int, DatumResult] = {}
    for part in results:
        for row, index in enumerate(part.row_id.tolist()):
            if index == NO_ROW:
                continue
            if index in found or not 0 <= index < len(datums):
                raise ServerError(
                    f"The ranks returned row {index} of {len(datums)} twice, or it is not part of the call."
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
