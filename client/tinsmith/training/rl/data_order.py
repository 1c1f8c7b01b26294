"""The order of groups over several epochs. A resumed run continues in the same order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset
from typing_extensions import override


class GroupPosition(NamedTuple):
    """The position of a group. `number` counts the groups of the whole run, and `epoch` counts the completed epochs."""

    number: int = 0
    epoch: int = 0
    batch: int = 0
    item: int = 0


class SequenceOfGroups(RLDataset):
    """A dataset that returns one group builder in each batch."""

    def __init__(self, builders: Sequence[EnvGroupBuilder]) -> None:
        self._builders = builders

    @override
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [self._builders[index]]

    @override
    def __len__(self) -> int:
        return len(self._builders)


class DataOrder(Iterator[tuple[GroupPosition, EnvGroupBuilder]]):
    """An endless iterator over pairs of a group and its position.

    A resumed run starts with the groups that were begun but not finished. With `shuffle_seed`, each epoch has a
    different order of batches. The order depends only on the seed and the number of the epoch.

    Raises ValueError if the data has no groups, and the errors of a dataset.
    """

    def __init__(
        self,
        groups: RLDataset | Sequence[EnvGroupBuilder],
        state: Mapping[str, Any] | None = None,
        *,
        shuffle_seed: int | None = None,
    ) -> None:
        self._shuffle_seed = shuffle_seed
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self._dataset = groups if isinstance(groups, RLDataset) else SequenceOfGroups(groups)
        begun = [GroupPosition(*place) for place in (state or {}).get("begun", [])]
        self._again = deque(sorted(begun))
        self._begun: set[GroupPosition] = set(begun)
        self._next = GroupPosition(*(state or {}).get("next", ()))
        self._batch: tuple[int, Sequence[EnvGroupBuilder]] | None = None

    @override
    def __next__(self) -> tuple[GroupPosition, EnvGroupBuilder]:
        if self._again:
            place = self._again.popleft()
            return place, self._batch_of(place)[place.item]
        place = self._next = self._found(self._next)
        self._begun.add(place)
        self._next = place._replace(number=place.number + 1, item=place.item + 1)
        return place, self._batch_of(place)[place.item]

    def finished(self, place: GroupPosition) -> None:
        """Record that the group was used for training, or was dropped."""
        self._begun.discard(place)

    def state(self) -> dict[str, Any]:
        """Return the state for `loop_state`."""
        return {"next": list(self._next), "begun": [list(place) for place in sorted(self._begun)]}

    def _found(self, place: GroupPosition) -> GroupPosition:
        """Return the first existing position at or after `place`."""
        for _ in range(2 + len(self._dataset)):
            if place.batch >= len(self._dataset):
                place = place._replace(epoch=place.epoch + 1, batch=0, item=0)
            elif place.item >= len(self._batch_of(place)):
                place = place._replace(batch=place.batch + 1, item=0)
            else:
                return place
        raise ValueError(f"there is no group in the {len(self._dataset)} batches of the data")

    def _batch_of(self, place: GroupPosition) -> Sequence[EnvGroupBuilder]:
        number = place.batch if self._shuffle_seed is None else self._shuffled_in(place.epoch)[place.batch]
        if self._batch is None or self._batch[0] != number:
            self._batch = (number, self._dataset.get_batch(number))
        return self._batch[1]

    def _shuffled_in(self, epoch: int) -> Sequence[int]:
        if self._order[0] != epoch:
            order = list(range(len(self._dataset)))
            random.Random(f"{self._shuffle_seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
