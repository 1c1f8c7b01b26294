"""The adapters of a decode batch as one stack: two small products per module serve all adapters.

With eight adapters and four rows per adapter, separate products (sixteen per module) took a third of a step's time,
mostly for the overhead of calls. An adapter's weights are copied into the stack once, when the adapter's first row
enters the batch. The stack is not used, and each adapter has separate products, if the weights are too large, if the
shapes of adapters differ, or if the numbers of rows per adapter are too unequal. The stacks of all batches share one
memory. A batch that does not use its stack gives it up if another batch needs the memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakSet

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
from tinsmith_trainer.sampling.builtin.draws import on_device
from tinsmith_trainer.torch_model.lora import OwnProduct, StackedDelta
from tinsmith_trainer.torch_model.products import linear_product

MOST_PADDING = 2
"""The limit on padding. All groups are padded to the length of the longest group.

All groups together have at most this many times as many rows as the forward.
"""


class StackMemory:
    """The memory for the stacks of all batches of a sampler."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.batches: WeakSet[AdapterGroups] = WeakSet()

    def has_room(self, nbytes: int, batch: AdapterGroups) -> bool:
        """Return whether a batch may have a stack of this size. Batches give up unused stacks if this makes room."""
        others = [other for other in self.batches if other is not batch]
        used = sum(other.nbytes for other in others if other.uses_stack)
        if nbytes + used > self._most_bytes:
            return False
        if nbytes + sum(other.nbytes for other in others) > self._most_bytes:
            for other in others:
                if not other.uses_stack:
                    other.give_up()
        return True


class AdapterGroups:
    """The adapters of one batch.

    An adapter keeps the same slot in the stack when other adapters are added or removed. `is_idle`: the batch has no
    samples.
    """

    def __init__(self, memory: StackMemory) -> None:
        self._memory = memory
        self.is_idle = True
        self._is_stacked = False
        self._runs: list[AdapterRun] = []
        self._route: dict[str, OwnProduct] = {}
        self._shape = AdapterShape()
        self._slots: list[LoadedAdapter] = []
        self._stack: dict[str, GroupWeights] = {}
        memory.batches.add(self)

    @property
    def nbytes(self) -> int:
        return sum(weights.nbytes for weights in self._stack.values())

    @property
    def uses_stack(self) -> bool:
        return self._is_stacked and not self.is_idle

    def give_up(self) -> None:
        """Free the stack, and empty the last route, which uses it."""
        self._route.clear()
        self._runs, self._shape, self._slots, self._stack = [], AdapterShape(), [], {}

    def route(self, runs: Sequence[AdapterRun], modules: Sequence[str]) -> Mapping[str, OwnProduct]:
        """Return the route of a forward with one token for each row. Two runs in `runs` never have the same adapter.

        Equal runs have the same route, on which recorded steps depend.
        """
        if runs != self._runs:
            self._runs = []  # an error below must not leave an older route for these runs
            self._route = self._new_route(runs, modules)
            self._runs = list(runs)
        return self._route

    def _new_route(self, runs: Sequence[AdapterRun], modules: Sequence[str]) -> dict[str, OwnProduct]:
        route = dict(route_by_products(runs, modules))
        self._is_stacked = self._fits(runs)
        if self._is_stacked:
            self._make_slots([adapter for adapter, _ in runs])
            slots = [(self._slots.index(adapter), rows) for adapter, rows in runs]
            device = next(iter(self._stack.values())).down.device
            layout = GroupLayout.of(slots, len(self._slots), device)
            route |= {name: GroupProducts(weights, layout) for name, weights in self._stack.items()}
        return route

    def _fits(self, runs: Sequence[AdapterRun]) -> bool:
        first = runs[0][0]
        if len(runs) == 1 or not first.deltas or any(adapter.shape != first.shape for adapter, _ in runs):
            return False
        rows, longest = sum(rows for _, rows in runs), max(rows for _, rows in runs)
        stacked = sum(delta.nbytes for delta in first.deltas.values())
        return len(runs) * longest <= MOST_PADDING * rows and self._memory.has_room(len(runs) * stacked, self)

    def _make_slots(self, adapters: Sequence[LoadedAdapter]) -> None:
        """Give each new adapter a slot. Rebuild the stack if half of the stack's adapters have left the batch."""
        shape, slots = adapters[0].shape, self._slots
        if shape != self._shape or len(adapters) > len(slots) or 2 * len(adapters) <= len(slots):
            self.give_up()
            self._shape = shape
            self._slots = slots = [BASE_MODEL] * len(adapters)
            self._stack = {name: GroupWeights(delta, len(adapters)) for name, delta in adapters[0].deltas.items()}
        free = [slot for slot, adapter in enumerate(slots) if adapter not in adapters]
        for adapter in adapters:
            if adapter not in slots:
                self._put(free.pop(0), adapter)

    def _put(self, slot: int, adapter: LoadedAdapter) -> None:
        self._slots[slot] = adapter
        for name, weights in self._stack.items():
            weights.put(slot, adapter.deltas[name])


class GroupWeights:
    """The weights of one module: `down` `[groups, d_in, rank]`, and the scaled `up` `[groups, rank, d_out]`.

    With weights in this layout, products take four fifths of the time of products with A and B.
    """

    def __init__(self, like: StackedDelta, groups: int) -> None:
        _, rank, d_in = like.lora_A.shape
        self.down = like.lora_A.new_zeros(groups, d_in, rank)
        self.up = like.lora_B.new_zeros(groups, rank, like.lora_B.shape[1])

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def put(self, group: int, delta: StackedDelta) -> None:
        self.down[group] = delta.lora_A[0].T
        torch.mul(delta.lora_B[0].T, delta.scale[0], out=self.up[group])


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The layout of rows in groups of equal size.

    `take` holds the row of each slot, and `back` holds the slot of each row.

    `take` and `back` are None if the order of the rows does not change.
    """

    groups: int
    order: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]], groups: int, device: torch.device) -> GroupLayout:
        """Return the layout. Each item of `runs` is a group and the number of consecutive rows of this group."""
        longest = max(rows for _, rows in runs)
        if runs == [(group, longest) for group in range(groups)]:
            return cls(groups, None)
        take = [[0] * longest for _ in range(groups)]
        back: list[int] = []
        start = 0
        for group, rows in runs:
            take[group][:rows] = range(start, start + rows)
            back += range(group * longest, group * longest + rows)
            start += rows
        flat = list(itertools.chain.from_iterable(take))
        return cls(groups, (on_device(flat, torch.long, device), on_device(back, torch.long, device)))


class GroupProducts(AdapterProducts):
    """The products of one module. The rows that pad a group are computed and ignored."""

    __slots__ = ("_layout", "_weights")

    def __init__(self, weights: GroupWeights, layout: GroupLayout) -> None:
        super().__init__((), uniform=False)  # products of experts use spans, and experts are never in a stack
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
