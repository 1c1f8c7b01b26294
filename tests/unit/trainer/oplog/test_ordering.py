"""The order of operations, whatever the order in which they arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.oplog.ordering import OperationOrder, Turn, failed_step_message, missing_failure


def run_all(order: OperationOrder) -> list[Turn]:
    turns = []
    while (turn := order.next_turn()) is not None:
        order.finish(turn)
        turns.append(turn)
    return turns


def test_a_turn_cannot_be_finished_twice() -> None:
    order = OperationOrder(applied=0)
    order.accept(1, is_forward_backward=True)
    turn = order.next_turn()
    assert turn is not None
    order.finish(turn)
    with pytest.raises(AssertionError, match="out of turn"):
        order.finish(turn)


@given(st.data())
def test_every_arrival_order_runs_the_same_operations_in_the_same_order(data: st.DataObject) -> None:
    """Arrivals may be permuted freely between two operations that are not forward_backwards."""
    windows = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    order, seq_id = OperationOrder(applied=0), 0
    ran: list[int] = []
    for chunk_count in windows:
        chunks = list(range(seq_id + 1, seq_id + 1 + chunk_count))
        for chunk in data.draw(st.permutations(chunks)):
            order.accept(chunk, is_forward_backward=True)
            if data.draw(st.booleans()):
                ran += [turn.seq_id for turn in run_all(order)]
        seq_id += chunk_count + 1
        order.accept(seq_id, is_forward_backward=False)
    ran += [turn.seq_id for turn in run_all(order)]
    assert ran == list(range(1, seq_id + 1))


@given(st.sets(st.integers(1, 12)), st.lists(st.integers(1, 12), unique=True))
def test_no_number_runs_twice_or_out_of_order(steps: set[int], arrivals: list[int]) -> None:
    order = OperationOrder(applied=0)
    ran: list[int] = []
    for seq_id in arrivals:
        if not order.is_late(seq_id):
            order.accept(seq_id, is_forward_backward=seq_id not in steps)
        ran += [turn.seq_id for turn in run_all(order)]
    assert ran == sorted(set(ran))


@pytest.mark.parametrize(
    ("missing", "expected"),
    [(range(3, 4), "operation 3 of this model never arrived"), (range(3, 6), "operations 3 to 5 of this model")],
    ids=["one", "several"],
)
def test_a_step_over_a_gap_says_which_operations_are_missing(missing: range, expected: str) -> None:
    assert expected in failed_step_message(missing_failure(missing))
