"""Packed rows are the tokens of the rows without padding, and go back to their rows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engine.datums import sft_datum
from tinsmith_trainer.engines.base import LossSpec
from tinsmith_trainer.engines.losses import prepare_loss
from tinsmith_trainer.engines.megatron.batch import encode, scored
from tinsmith_trainer.engines.megatron.model.packed_rows import PackedRows
from tinsmith_trainer.engines.megatron.sharding import fill_up

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(1, 8))
def test_sequences_are_the_datums_and_padding_to_a_multiple_is_a_sequence_of_its_own(
    lengths: list[int], multiple_of: int
) -> None:
    datums = [sft_datum(length, seed) for seed, length in enumerate(lengths)]
    batch = encode(datums, prepare_loss(LossSpec("cross_entropy"), datums).arrays)
    rows = PackedRows.of(batch, multiple_of=multiple_of, device=CPU)

    filling = -sum(lengths) % multiple_of
    assert list(rows.lengths) == [*lengths, filling][: len(lengths) + bool(filling)]
    tokens = torch.cat([torch.from_numpy(datum.tokens).long() for datum in datums])
    assert torch.equal(rows.tokens[0, : len(tokens)], tokens)
    assert rows.tokens.shape == rows.positions.shape == (1, sum(lengths) + filling)
    assert rows.parameters().cu_seqlens_q[-1] == sum(lengths) + filling

    targets = scored(batch).targets
    packed = rows.packed(targets)
    assert packed.tolist() == [[target for datum in datums for target in datum.loss_inputs["target_tokens"].tolist()]]
    in_rows = rows.in_rows(packed.float() + 1, targets)
    assert in_rows.shape == targets.shape
    assert in_rows.count_nonzero() == sum(lengths)


def test_a_row_without_a_datum_is_one_token() -> None:
    datums = [sft_datum(3)]
    batch = fill_up(encode(datums, prepare_loss(LossSpec("cross_entropy"), datums).arrays), 2)
    assert PackedRows.of(batch, multiple_of=1, device=CPU).lengths == [3, 1]
