"""The adapters of a decode batch as one stack, so that two small products of a module serve all of them.

With eight adapters of four rows each, sixteen products a module took a third of a step's time, most of it calls.
Weights are copied once, when an adapter's first row comes. Where they are too large for that, of unlike shapes, or
spread too unevenly over the rows, each adapter's rows have products of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from tinsmith_trainer.sampling.builtin.adapters import (
    BASE_MODEL,
    AdapterProducts,
    AdapterRun,
    AdapterShape,
    LoadedAdapter,
    route_by_products,
)
from tinsmith_trainer.torch_model.lora import OwnProduct, StackedDelta
from tinsmith_trainer.torch_model.products import linear_product

MOST_PADDING = 2
"""Groups are as long as the longest. All together have so many times the forward's rows at most."""


class AdapterGroups:
    """Those of one batch. An adapter keeps its place in the stack while others come and go."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._shape = AdapterShape()
        self._slots: list[LoadedAdapter] = []
        self._stack: dict[str, GroupWeights] = {}

    def route(self, runs: Sequence[AdapterRun], modules: Sequence[str]) -> Mapping[str, OwnProduct]:
        """Of a forward of a token for each row; `runs` are of different adapters."""
        route = dict(route_by_products(runs, modules))
        if self._fits(runs):
            self._make_slots([adapter for adapter, _ in runs])
            places = [(self._slots.index(adapter), rows) for adapter, rows in runs]
            layout = GroupLayout.of(places, len(self._slots))
            route |= {name: GroupProducts(weights, layout) for name, weights in self._stack.items()}
        return route

    def _fits(self, runs: Sequence[AdapterRun]) -> bool:
        first = runs[0][0]
        if len(runs) == 1 or not first.deltas or any(adapter.shape != first.shape for adapter, _ in runs):
            return False
        rows, longest = sum(rows for _, rows in runs), max(rows for _, rows in runs)
        stacked = sum(delta.nbytes for delta in first.deltas.values())
        return len(runs) * longest <= MOST_PADDING * rows and len(runs) * stacked <= self._most_bytes

    def _make_slots(self, adapters: Sequence[LoadedAdapter]) -> None:
        """For each that has none; all anew where those that left have as many as those that are here."""
        shape, places = adapters[0].shape, self._slots
        if shape != self._shape or len(adapters) > len(places) or 2 * len(adapters) <= len(places):
            self._shape = shape
            self._slots = places = [BASE_MODEL] * len(adapters)
            self._stack = {name: GroupWeights(delta, len(adapters)) for name, delta in adapters[0].deltas.items()}
        free = [place for place, adapter in enumerate(places) if adapter not in adapters]
        for adapter in adapters:
            if adapter not in places:
                self._put(free.pop(0), adapter)

    def _put(self, place: int, adapter: LoadedAdapter) -> None:
        self._slots[place] = adapter
        for name, weights in self._stack.items():
            weights.put(place, adapter.deltas[name])


class GroupWeights:
    """One module's: `down` `[groups, d_in, rank]`, `up` `[groups, rank, d_out]`, which has the scale in it.

    So laid out the products take four fifths of the time that they take of A and B as they come.
    """

    def __init__(self, like: StackedDelta, groups: int) -> None:
        _, rank, d_in = like.lora_A.shape
        self.down = like.lora_A.new_zeros(groups, d_in, rank)
        self.up = like.lora_B.new_zeros(groups, rank, like.lora_B.shape[1])

    def put(self, group: int, delta: StackedDelta) -> None:
        self.down[group] = delta.lora_A[0].T
        torch.mul(delta.lora_B[0].T, delta.scale[0], out=self.up[group])


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How rows lie in equal groups: `take` is the row of each place in them, `back` the place of each row.

    None: as they are.
    """

    groups: int
    order: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]], groups: int) -> GroupLayout:
        """`runs`: the group of rows that follow one another, and how many they are."""
        longest = max(rows for _, rows in runs)
        if runs == [(group, longest) for group in range(groups)]:
            return cls(groups, None)
        take = torch.zeros(groups, longest, dtype=torch.long)
        back: list[int] = []
        start = 0
        for group, rows in runs:
            take[group, :rows] = torch.arange(start, start + rows)
            back += range(group * longest, group * longest + rows)
            start += rows
        return cls(groups, (take.flatten(), torch.tensor(back)))


class GroupProducts(AdapterProducts):
    """One module's. Rows that fill a group up are computed and left."""

    __slots__ = ("_layout", "_weights")

    def __init__(self, weights: GroupWeights, layout: GroupLayout) -> None:
        super().__init__((), uniform=False)  # experts ask for spans, and are never in a stack
        self._weights = weights
        self._layout = layout

    @override
    def __call__(self, x: Tensor, base: nn.Linear) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = linear_product(flat, base.weight, base.bias)
        wide, order, groups = flat.to(self._weights.down.dtype), self._layout.order, self._layout.groups
        if order is not None:
            wide = wide.index_select(0, order[0])
        down = torch.bmm(wide.view(groups, -1, wide.shape[-1]), self._weights.down)
        if order is None and out.dtype == down.dtype:
            out.view(groups, -1, out.shape[-1]).baddbmm_(down, self._weights.up)
        else:
            delta = torch.bmm(down, self._weights.up).view(-1, out.shape[-1])
            out += delta if order is None else delta.index_select(0, order[1])
        return out.view(*x.shape[:-1], -1)
