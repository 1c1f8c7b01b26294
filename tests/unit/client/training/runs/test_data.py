"""Learning rates and batches depend only on the number of a step."""

from __future__ import annotations

from collections import Counter

import pytest
from tinsmith.training.runs.data import Schedule, ShuffledBatches, held_out_split, learning_rate_at

pytestmark = pytest.mark.pytorch


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 2, 3, 3, 3, 3]),
        ("linear", [1, 2, 3, 2.25, 1.5, 0.75]),
        ("cosine", [1, 2, 3, 2.56066, 1.5, 0.43934]),
    ],
)
def test_a_schedule_rises_and_falls(schedule: Schedule, expected: list[float]) -> None:
    rates = [learning_rate_at(step, 6, 3.0, schedule, warmup_steps=2) for step in range(6)]
    assert rates == pytest.approx(expected, rel=1e-5)


def test_each_epoch_has_every_example_once_in_its_own_order() -> None:
    batches = ShuffledBatches(count=10, batch_size=4, epochs=3, seed=1)
    order = [place for number in range(len(batches)) for place in batches[number]]
    assert [len(batches[number]) for number in range(len(batches))] == [4] * 7 + [2]
    epochs = [order[first : first + 10] for first in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(10))


@pytest.mark.parametrize(
    ("count", "fraction", "most", "held_out"),
    [
        (10, 0.0, 100, 0),
        (10, 0.1, 100, 1),
        (10, 0.11, 100, 2),
        (1, 0.5, 100, 0),
        (70, 0.1, 100, 7),  # 70 * 0.1 > 7
        (151, 0.9, 100, 100),  # 151 * (100 / 151) > 100
        (10, 0.5, 0, 0),
    ],
)
def test_a_part_is_held_out_at_most_so_many_and_something_is_left(
    count: int, fraction: float, most: int, held_out: int
) -> None:
    train, held = held_out_split(count, fraction, most, seed=3)
    assert len(held) == held_out
    assert sorted(train + held) == list(range(count))
    assert (train, held) == held_out_split(count, fraction, most, seed=3)


def test_a_batch_larger_than_the_data_repeats_examples_and_the_last_batch_ends_the_run() -> None:
    batches = ShuffledBatches(count=3, batch_size=5, epochs=2, seed=0)
    assert Counter(batches[0] + batches[1]) == {0: 2, 1: 2, 2: 2}
    assert [batches.epoch_after(number) for number in (0, 1)] == [5 / 3, 2.0]
    with pytest.raises(IndexError):
        batches[2]
