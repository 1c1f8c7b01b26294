"""The rows of a microbatch as packed sequences: one row after the other, without padding between them.

Batches keep their rows, in which losses are computed. Only the model's input and output are packed. A sequence has the
scored positions of its row; the last column of a row, which no position scores, is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from tinsmith_trainer.engines.megatron.batch import INPUT_IDS, Batch, packed_lengths, read_left


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The packed sequences of one microbatch on the model's device.

    `tokens` and `positions` are `[1, tokens]`. `lengths` are the lengths of all sequences; padding at the end, up to a
    multiple of the ranks that divide a sequence, is a sequence of its own. `places` are the indices of the tokens
    before this padding, among all scored positions of the rows.
    """

    lengths: Sequence[int]
    tokens: Tensor
    positions: Tensor
    places: Tensor

    @classmethod
    def of(cls, batch: Batch, *, multiple_of: int, device: torch.device) -> Self:
        """Pack a batch on the host."""
        columns = read_left(batch[INPUT_IDS])
        lengths = packed_lengths(batch)
        filled = torch.arange(columns.shape[1]) < torch.tensor(lengths).unsqueeze(1)
        tokens = columns[filled]
        if filling := -len(tokens) % multiple_of:
            lengths, tokens = [*lengths, filling], torch.cat([tokens, tokens.new_zeros(filling)])
        positions = torch.cat([torch.arange(length) for length in lengths])
        places = filled.flatten().nonzero().squeeze(1)
        return cls(lengths, tokens.unsqueeze(0).to(device), positions.unsqueeze(0).to(device), places.to(device))

    def parameters(self) -> PackedSeqParams:
        """Return the ends of the sequences in the form in which Megatron's attention reads them."""
        ends = [0, *itertools.accumulate(self.lengths)]
        cumulated = torch.tensor(ends, dtype=torch.int32).to(self.tokens.device)
        longest = max(self.lengths)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cumulated,
            cu_seqlens_kv=cumulated,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def packed(self, in_rows: Tensor) -> Tensor:
        """Return values of the scored positions `[b, S']` or `[b, S', K]` as `[1, tokens]` or `[1, tokens, K]`."""
        return in_rows.flatten(0, 1)[self.places].unsqueeze(0)

    def in_rows(self, packed: Tensor, like: Tensor) -> Tensor:
        """Return packed values in the rows of `like`, with zeros for padding. This is the inverse of `packed`."""
        empty = packed.new_zeros(like.flatten(0, 1).shape)
        return empty.index_copy(0, self.places, packed.squeeze(0)).view(like.shape)
