"""Where Tinker's per-token values stand in a batch for a model that scores token i + 1 at position i.

Tinker gives tokens `x[0..T-1]` and targets `t[0..T-1]`, and scores `t[i]` at position i. NeMo RL scores
column i + 1 of a batch there, so every per-token value stands one column to the right, and a row has a column
more than its datum has tokens. Where targets are the tokens shifted by one, as in most training data, the
last target takes that column and no targets are sent beside the tokens: a *shifted* batch. Else the column holds a
token that no scored position sees, and the targets are a column of their own: a *general* batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_trainer.engines.base import Datum

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
