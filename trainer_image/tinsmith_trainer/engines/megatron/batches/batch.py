"""A call's datums as one batch of tensors, right padded. The names are those that NeMo RL's workers read.

A plain dict of torch CPU tensors with the rows in dimension 0 and, where there are two dimensions or more, the
sequence in dimension 1; NeMo RL's `BatchedDataDict` wraps it as it is.

| Key | Shape, type | What |
|---|---|---|
| `input_ids` | `[b, S]` int64 | tokens; in a shifted batch the last target behind them |
| `input_lengths` | `[b]` int64 | columns that are not padding |
| `token_mask` | `[b, S]` float32 | 1 where a target is scored, by the rule of `alignment` |
| `sample_mask` | `[b]` float32 | 1, and 0 in rows that fill up |
| `row_id` | `[b]` int64 | the datum's index in the call, and -1 in rows that fill up |
| `target_ids` | `[b, S]` or `[b, S, K]` int64 | in a general batch alone |
| `loss/<input>` | as the targets, float32 | the loss's inputs |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_trainer.engines.base import Datum
from tinsmith_trainer.engines.losses import VALID, LossArrays
from tinsmith_trainer.engines.megatron.batches.alignment import (
    EXTRA_COLUMNS,
    TARGETS,
    Values,
    all_shifted,
    read_right,
    row_length,
    row_tokens,
    width,
    write_right,
)

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
