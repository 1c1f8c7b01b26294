"""Each group comes once in an epoch, and after a resume the unfinished ones come first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset
from tinsmith.training.rl.data_order import DataOrder

pytestmark = pytest.mark.pytorch


class Group(EnvGroupBuilder):
    def __init__(self, name: str) -> None:
        self.name = name

    async def make_envs(self) -> Sequence[Env]:
        raise NotImplementedError


class Batches(RLDataset):
    def __init__(self, *batches: str) -> None:
        self._batches = batches

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [Group(name) for name in self._batches[index]]

    def __len__(self) -> int:
        return len(self._batches)


DATA = Batches("ab", "", "c")


def taken(order: DataOrder, count: int) -> list[tuple[int, str]]:
    found = [next(order) for _ in range(count)]
    return [(place.number, group.name) for place, group in found if isinstance(group, Group)]


def test_a_resumed_run_continues_after_the_data_of_the_last_step() -> None:
    order = DataOrder(DATA)
    for _ in range(4):
        place, _ = next(order)
        order.finished(place)
    assert taken(DataOrder(DATA, order.state()), 2) == taken(order, 2) == [(4, "b"), (5, "c")]


def test_a_resumed_run_begins_with_the_unfinished_groups() -> None:
    order = DataOrder(DATA)
    places = [next(order)[0] for _ in range(4)]
    order.finished(places[2])
    order.finished(places[0])
    again = DataOrder(DATA, order.state())
    assert again.state() == order.state()
    assert taken(again, 3) == [(1, "b"), (3, "a"), (4, "b")]


LETTERS = [Group(name) for name in "abcdefgh"]


def names(order: DataOrder, count: int) -> str:
    return "".join(name for _, name in taken(order, count))


def test_a_seed_orders_each_time_through_the_data_otherwise() -> None:
    order = names(DataOrder(LETTERS, shuffle_seed=1), 24)
    epochs = [order[first : first + 8] for first in (0, 8, 16)]
    assert all(sorted(epoch) == list("abcdefgh") for epoch in epochs)
    assert len({*epochs, "abcdefgh"}) == 4
    assert names(DataOrder(LETTERS, shuffle_seed=1), 24) == order != names(DataOrder(LETTERS, shuffle_seed=2), 24)


@pytest.mark.parametrize("done", [3, 8, 13])
def test_a_resumed_run_continues_in_the_same_shuffled_order(done: int) -> None:
    expected = taken(DataOrder(LETTERS, shuffle_seed=1), 24)
    order = DataOrder(LETTERS, shuffle_seed=1)
    places = [next(order)[0] for _ in range(done)]
    for place in places[:-2]:
        order.finished(place)
    again = DataOrder(LETTERS, order.state(), shuffle_seed=1)
    assert taken(again, 24 - done + 2) == expected[done - 2 :]


def test_a_shuffled_run_resumes_with_the_unfinished_groups_of_the_previous_epoch() -> None:
    expected = taken(DataOrder(LETTERS, shuffle_seed=1), 12)
    order = DataOrder(LETTERS, shuffle_seed=1)
    places = [next(order)[0] for _ in range(10)]
    for place in places:
        if place.number not in (5, 9):
            order.finished(place)
    again = DataOrder(LETTERS, order.state(), shuffle_seed=1)
    assert taken(again, 4) == [expected[5], expected[9], *expected[10:]]


@pytest.mark.parametrize(("data", "batches"), [(Batches("", ""), 2), ([], 0)])
def test_data_without_a_group_is_refused(data: RLDataset | list[EnvGroupBuilder], batches: int) -> None:
    with pytest.raises(ValueError, match=f"no group in the {batches} batches"):
        next(DataOrder(data))
