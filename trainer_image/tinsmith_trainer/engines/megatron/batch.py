"""Where Tinker's per-token values stand in a batch for a model that scores token i + 1 at position i.

Tinker gives tokens `x[0..T-1]` and targets `t[0..T-1]`, and scores `t[i]` at position i. NeMo RL scores
column i + 1 of a batch there, so every per-token value stands one column to the right, and a row has a column
more than its datum has tokens. Where targets are the tokens shifted by one, as in most training data, the
last target takes that column and no targets are sent beside the tokens: a *shifted* batch. Else the column holds a
token that no scored position sees, and the targets are a column of their own: a *general* batch.
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
    """Whether each token but the first is the target of the one before it."""
    targets = datum.loss_inputs[TARGETS]
    return targets.ndim == 1 and bool(np.array_equal(targets[:-1], datum.tokens[1:]))


def all_shifted(datums: Sequence[Datum]) -> bool:
    """One datum that is not makes the whole call general: its batches have one set of columns."""
    return all(is_shifted(datum) for datum in datums)


def row_length(datum: Datum) -> int:
    """Columns of its row that are not padding."""
    return datum.length + EXTRA_COLUMNS


def row_tokens(datum: Datum, *, shifted: bool) -> Tensor:
    """int64 `[T + 1]`, what the model reads."""
    last = datum.loss_inputs[TARGETS][-1] if shifted else UNSEEN_TOKEN
    return torch.from_numpy(np.append(datum.tokens, last).astype(np.int64))


def write_right(row: Tensor, values: Values) -> None:
    """Puts a datum's values `[T]` or `[T, k]` one column to the right, into a row `[S]` or `[S, K]`, K at least k."""
    given = torch.from_numpy(np.array(values))  # a copy: what a client sent may be read-only
    if row.ndim == 2:
        row[EXTRA_COLUMNS : EXTRA_COLUMNS + len(given), : width(values) or 1] = given.reshape(len(given), -1)
    else:
        row[EXTRA_COLUMNS : EXTRA_COLUMNS + len(given)] = given


def read_right(column: Tensor) -> Tensor:
    """Of a batch's column `[b, S]` or `[b, S, K]` the part that is scored: position i is Tinker's position i."""
    return column[:, EXTRA_COLUMNS:]


def width(values: Values) -> int | None:
    """K of `[T, K]`, None of `[T]`."""
    return values.shape[1] if values.ndim == 2 else None


Batch = dict[str, Tensor]

INPUT_IDS, INPUT_LENGTHS = "input_ids", "input_lengths"
TOKEN_MASK, SAMPLE_MASK = "token_mask", "sample_mask"
ROW_ID, TARGET_IDS = "row_id", "target_ids"
LOSS_PREFIX = "loss/"
NO_ROW = -1


@dataclass(frozen=True, slots=True)
class Scored:
    """What a loss sees of a batch; position i of S' = S - 1 is Tinker's position i.

    `targets` int64 `[b, S']` or `[b, S', K]`; `inputs` the loss's, of the same shape, and `valid` bool `[b, S']`.
    The logits that score position i are those of the model's position i.
    """

    targets: Tensor
    inputs: Mapping[str, Tensor]


def encode(
    datums: Sequence[Datum], loss_arrays: Sequence[LossArrays], *, multiple_of: int = 1, shifted: bool | None = None
) -> Batch:
    """One row per datum, in their order, all of one length that is a multiple of `multiple_of`.

    `shifted` is `all_shifted` of the whole call, since all of its batches have the same columns; None: of these.
    `loss_arrays` are a PreparedLoss's: the same names for every datum, each of its targets' shape. Where datums
    differ in how many targets a position has, they get as many as the widest; what is added has no weight.
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
    """Zeros where no row has a value: padding, and targets that only other rows have."""
    widest = max((width(values) or 0 for values in rows), default=0)
    shape = (len(rows), columns, widest) if widest else (len(rows), columns)
    column = torch.zeros(shape, dtype=dtype)
    for row, values in enumerate(rows):
        write_right(column[row], values)
    return column


def scored(batch: Mapping[str, Tensor]) -> Scored:
    """Reads both alignments alike. The tensors are views."""
    inputs = {
        name.removeprefix(LOSS_PREFIX): read_right(column)
        for name, column in batch.items()
        if name.startswith(LOSS_PREFIX)
    }
    targets = batch[TARGET_IDS] if TARGET_IDS in batch else batch[INPUT_IDS]
    return Scored(read_right(targets), inputs | {VALID: read_right(batch[TOKEN_MASK]) > 0})


def rows_in(batch: Mapping[str, Tensor]) -> int:
    return len(batch[ROW_ID])


def take(batch: Mapping[str, Tensor], rows: Tensor) -> Batch:
    """A batch of some of its rows, by index, in that order. Copies."""
    return {name: column[rows] for name, column in batch.items()}


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
