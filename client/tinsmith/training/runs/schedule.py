"""What step has which learning rate, and which examples."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_at(step: int, total_steps: int, highest: float, schedule: Schedule, warmup_steps: int) -> float:
    """Of step `step`, which counts from 0. The first step of a warm-up has a part of the highest, none has 0."""
    if step < warmup_steps:
        return highest * (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    if schedule == "linear":
        return highest * (1 - done)
    if schedule == "cosine":
        return highest * 0.5 * (1 + math.cos(math.pi * done))
    return highest


class ShuffledBatches:
    """Batches over several epochs, each in an order of its own that the seed says; the last batch may be smaller.

    A batch is known by its number alone: a run that goes on needs no other position.
    """

    def __init__(self, count: int, batch_size: int, epochs: int, seed: int) -> None:
        self._count = count
        self.batch_size = batch_size
        self._examples = count * epochs
        self._seed = seed
        self._epoch: tuple[int, Sequence[int]] = (-1, ())

    def __len__(self) -> int:
        return math.ceil(self._examples / self.batch_size)

    def __getitem__(self, number: int) -> list[int]:
        """Places of the examples in the data. Raises IndexError after the last batch."""
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        first = number * self.batch_size
        return [self._place(at) for at in range(first, min(first + self.batch_size, self._examples))]

    def epoch_after(self, number: int) -> float:
        """How often the data was gone through when batch `number` is done."""
        return min((number + 1) * self.batch_size, self._examples) / self._count

    def _place(self, at: int) -> int:
        epoch, within = divmod(at, self._count)
        if self._epoch[0] != epoch:
            order = list(range(self._count))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._epoch = (epoch, order)
        return self._epoch[1][within]


def held_out_split(count: int, fraction: float, most: int, seed: int) -> tuple[list[int], list[int]]:
    """Places of those to train on and of those that are held out, `most` at most, by chance.

    At least one stays to train on.
    """
    # The fraction as it is written: in floating point 70 * 0.1 is more than 7.
    held_out = min(math.ceil(count * Fraction(str(fraction))), most, count - 1)
    order = list(range(count))
    random.Random(f"{seed} held out").shuffle(order)
    return sorted(order[held_out:]), sorted(order[:held_out])
