"""The division of a call among data-parallel ranks and microbatches.

Copies of the model compute independently until a call's gradients are summed, so the copies' microbatches may differ. A
microbatch is as long as its longest datum; each pipeline stage sends the shape of a microbatch to the next stage. If
context ranks pack sequences, all rows of a call have the same length. With packing, padding inside rows is removed
before the computation, and padding rows fill the last microbatches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from tinsmith_trainer.engines.base import Datum
from tinsmith_trainer.engines.batching import CELLS_PER_TOKEN
from tinsmith_trainer.engines.losses import LossArrays
from tinsmith_trainer.engines.megatron.batch import (
    INPUT_LENGTHS,
    NO_ROW,
    ROW_ID,
    Batch,
    all_shifted,
    encode,
    rows_in,
    take,
)
from tinsmith_trainer.engines.megatron.parallelism import Parallelism

MAX_ROWS = 8
LOGPROB_CHUNK_TOKENS = 1024
"""The number of tokens for which logits are in memory at the same time.

The logits of a whole sequence would not fit in memory together with the model.
"""

LEAST_FILLED_SHARE = 0.5
"""The limit on padding in a row: a datum joins longer datums only if at most half of the datum's row is padding."""


Cut = Callable[[Sequence[int], Sequence[int], int], list[list[int]]]
"""A function that splits rows of decreasing lengths into microbatches of a number of tokens."""


def shards_of(
    datums: Sequence[Datum],
    arrays: Sequence[LossArrays],
    layout: Parallelism,
    token_budget: int,
    *,
    packed: bool = False,
    most_rows: int = MAX_ROWS,
    call_ends: Sequence[int] = (),
) -> list[list[Batch]]:
    """Return the microbatches of each data-parallel rank; every rank has at least one microbatch.

    Each datum is in exactly one microbatch; row ids are the indices of datums in the call. In a microbatch of several
    calls, which end at the indices `call_ends`, the rows of each call are consecutive. `packed`: the model computes no
    padding between rows, so a microbatch may have rows of any lengths.

    The tensors share no memory, because pickling a view copies the whole tensor to which the view belongs.
    """
    if layout.context > 1:
        return equal_shards(datums, arrays, layout, token_budget)
    cut = cut_by_tokens if packed else partial(cut_by_length, most_rows=most_rows)
    return close_shards(datums, arrays, layout, token_budget, cut=cut, call_ends=call_ends)


def length_multiple(*, tensor: int, context: int) -> int:
    """Return the number that must divide the length of each row.

    Tensor ranks divide a sequence. Each context rank takes two pieces, one from each end of the sequence, so that
    causal attention costs the same on all context ranks.
    """
    return tensor * (2 * context if context > 1 else 1)


def close_shards(
    datums: Sequence[Datum],
    arrays: Sequence[LossArrays],
    layout: Parallelism,
    token_budget: int,
    *,
    cut: Cut | None = None,
    call_ends: Sequence[int] = (),
) -> list[list[Batch]]:
    """Distribute datums by length, so that copies of the model have similar work.

    Microbatches have decreasing lengths. A pipeline stage waits for the previous stage, so all stages should work on
    similar lengths at the same time.
    """
    lengths = [datum.length for datum in datums]
    multiple = length_multiple(tensor=layout.tensor, context=layout.context)
    shifted = all_shifted(datums)

    def batch(by_length: Sequence[int]) -> Batch:
        rows = sorted(by_length, key=lambda row: call_of(row, call_ends))
        own, of_loss = [datums[row] for row in rows], [arrays[row] for row in rows]
        return encode(own, of_loss, multiple_of=multiple, shifted=shifted) | {ROW_ID: torch.tensor(rows)}

    by_length = sorted(range(len(datums)), key=lambda row: -lengths[row])
    # A rank without datums still takes part in the sum of gradients.
    idle = filling(batch(by_length[-1:]), 1)
    dealt = (by_length[rank :: layout.data] for rank in range(layout.data))
    shards = [[batch(rows) for rows in (cut or cut_by_length)(list(own), lengths, token_budget)] for own in dealt]
    # Copies that share experts exchange tokens in each microbatch, so they have equally many.
    least = max(map(len, shards)) if layout.expert > 1 else 1
    return [shard + [idle] * (least - len(shard)) for shard in shards]


def call_of(row_id: int, ends: Sequence[int]) -> int:
    """Return the index of the call to which a row belongs. Padding rows belong to the first call."""
    return bisect_right(ends, row_id)


def row_count(length: int, token_budget: int, most_rows: int = MAX_ROWS) -> int:
    """Return how many rows of this length a microbatch can hold."""
    return max(1, min(most_rows, token_budget // length))


def cut_by_length(
    rows: Sequence[int], lengths: Sequence[int], token_budget: int, most_rows: int = MAX_ROWS
) -> list[list[int]]:
    """Split rows of decreasing lengths into microbatches.

    The first row of a microbatch determines how many rows fit.
    """
    parts: list[list[int]] = []
    for row in rows:
        longest = lengths[parts[-1][0]] if parts else 0
        is_close = lengths[row] >= LEAST_FILLED_SHARE * longest
        if parts and is_close and len(parts[-1]) < row_count(longest, token_budget, most_rows):
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def cut_by_tokens(rows: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Split rows of decreasing lengths into microbatches of at most so many tokens without padding.

    Losses take rows as wide as the longest datum, so the padding of rows is limited, too.
    """
    parts: list[list[int]] = []
    tokens = 0
    for row in rows:
        cells = (len(parts[-1]) + 1) * lengths[parts[-1][0]] if parts else 0
        if parts and tokens + lengths[row] <= token_budget and cells <= CELLS_PER_TOKEN * token_budget:
            parts[-1].append(row)
            tokens += lengths[row]
        else:
            parts.append([row])
            tokens = lengths[row]
    return parts


def equal_shards(
    datums: Sequence[Datum], arrays: Sequence[LossArrays], layout: Parallelism, token_budget: int
) -> list[list[Batch]]:
    """Distribute rows of equal length (the length of the call's longest datum), and spread the padding rows evenly."""
    multiple = length_multiple(tensor=layout.tensor, context=layout.context)
    most = row_count(max(datum.length for datum in datums), token_budget)
    rows = rows_of_microbatch(len(datums), layout.data, most)
    filled = fill_up(encode(datums, arrays, multiple_of=multiple), layout.data * rows)
    dealt = [torch.arange(rank, rows_in(filled), layout.data) for rank in range(layout.data)]
    return [[take(filled, own[start : start + rows]) for start in range(0, len(own), rows)] for own in dealt]


def rows_of_microbatch(rows: int, data_parallel: int, most: int) -> int:
    """Return the smallest number of rows per microbatch that does not increase the number of microbatches.

    With 9 rows and at most 8 rows per microbatch, the result is 5, because 8 would leave a microbatch with one row and
    7 padding rows.
    """
    share = -(-rows // data_parallel)
    return -(-share // -(-share // most))


def fill_up(batch: Mapping[str, Tensor], multiple_of_rows: int) -> Batch:
    """Add padding rows until the number of rows is a multiple of `multiple_of_rows`."""
    missing = filling(batch, -rows_in(batch) % multiple_of_rows)
    return {name: torch.cat([column, missing[name]]) for name, column in batch.items()}


def filling(batch: Mapping[str, Tensor], rows: int) -> Batch:
    """Return padding rows in the shape of the batch. A padding row has one token, no target, no weight and no datum.

    A row without tokens would divide by zero in packed attention.
    """
    empty = {name: column.new_zeros(rows, *column.shape[1:]) for name, column in batch.items()}
    return empty | {INPUT_LENGTHS: torch.ones(rows, dtype=torch.int64), ROW_ID: torch.full((rows,), NO_ROW)}
