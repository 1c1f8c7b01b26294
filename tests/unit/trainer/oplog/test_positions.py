"""The positions of plain calls among the numbered calls of a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_rpc import PLAIN_SEQ_IDS, RELEASE_SEQ_ID
from tinsmith_trainer.oplog.positions import PlainPositions


@given(st.lists(st.booleans(), max_size=60), st.booleans())
def test_positions_and_numbers_are_those_of_a_list_of_calls(plain: list[bool], stored: bool) -> None:
    """`plain` says for each position from 1 on whether a plain call has it."""
    positions = PlainPositions()
    for position, is_plain in enumerate(plain, start=1):
        if is_plain:
            positions.add(position)
    if stored:
        positions = PlainPositions(zip(positions._firsts, positions._lasts, strict=True))
    numbers = [0]
    for position, is_plain in enumerate(plain, start=1):
        numbers.append(numbers[-1] + (not is_plain))
        seq_id = PLAIN_SEQ_IDS + position if is_plain else numbers[-1]
        assert (position in positions) == is_plain
        assert positions.seq_id_of(position) == seq_id
        assert positions.position_of(seq_id) == position
    for position, number in enumerate(numbers):
        assert positions.numbered_up_to(position) == number
    # Later numbers continue after all of them.
    assert positions.position_of(numbers[-1] + 1) == len(plain) + 1
    assert positions.position_of(RELEASE_SEQ_ID) == positions.seq_id_of(RELEASE_SEQ_ID) == RELEASE_SEQ_ID


@given(st.lists(st.integers(1, 4), min_size=1, max_size=20))
def test_a_removed_position_is_free_again(gaps: list[int]) -> None:
    positions, reference, position = PlainPositions(), PlainPositions(), 0
    for gap in gaps:
        position += gap
        positions.add(position)
        positions.remove_last()
        for each in (positions, reference):
            each.add(position)
        assert [positions.seq_id_of(each) for each in range(position + 2)] == [
            reference.seq_id_of(each) for each in range(position + 2)
        ]


def test_a_position_below_another_is_refused() -> None:
    positions = PlainPositions([(3, 4)])
    with pytest.raises(AssertionError, match="does not follow"):
        positions.add(4)
