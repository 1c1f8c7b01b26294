"""Loaded adapter versions, and the routes, which assign an adapter to each row of a batch.

A route is a route by products or a stacked route. A route by products is fast. In a route by products, the rows of one
adapter are adjacent and share one product, so no weights are copied, and a batch may have adapters of any rank and
size. A stacked route is used in deterministic mode, in which the bits of a row must not depend on other rows. In a
stacked route, the adapters of a batch have one padded rank and one set of modules, and each row is a group. Adapters of
experts are never stacked. Adapters of experts are large, and the bits of their products do not depend on other rows
anyway (torch_model/expert_products.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.engines.tensor_files import is_aligned
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.torch_model.experts import ExpertProjection
from tinsmith_trainer.torch_model.loading import LoraLayer
from tinsmith_trainer.torch_model.lora import OwnDelta, OwnProduct, OwnSpan, Route, StackedDelta
from tinsmith_trainer.torch_model.products import linear_product

BASE_SERIAL = 0
PADDED_RANKS = (8, 32, 128)  # few values, so that adapters of different ranks can share a batch
_serials = itertools.count(BASE_SERIAL + 1)


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """The shape properties that all adapters of a stacked batch must have in common.

    The base model has rank 0 and no modules.
    """

    padded_rank: int = 0
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An immutable adapter version on the device. The base model is an adapter without deltas.

    A `serial` is never used again. So values of a dropped version cannot be mistaken for values of a later version with
    the same key. Each delta in `deltas` has one group; only linear layers are included.
    """

    key: str
    serial: int
    shape: AdapterShape
    deltas: Mapping[str, StackedDelta] = field(repr=False)
    own: Mapping[str, OwnDelta] = field(repr=False, default_factory=dict)
    """The weights without padding, including the weights of experts.

    Only products with a single adapter use the weights without padding.
    """

    @property
    def nbytes(self) -> int:
        return sum(self.deltas.get(name, own).nbytes for name, own in self.own.items())

    def route(self, rows: int) -> Route:
        """Return a route that uses this adapter for each of `rows` groups, without copying weights."""
        return {**{name: _expanded(delta, rows) for name, delta in self.deltas.items()}, **self._of_experts()}

    def route_of_all(self) -> Route:
        """Return a route that uses this adapter for all rows, as one group."""
        return {**self.deltas, **self._of_experts()}

    def _of_experts(self) -> Route:
        return {
            name: AdapterProducts([(0, 0, own)], uniform=True)
            for name, own in self.own.items()
            if name not in self.deltas
        }


BASE_MODEL = LoadedAdapter("", BASE_SERIAL, AdapterShape(), {})


def load_adapter(
    key: str,
    state: AdapterState,
    layers: Mapping[str, LoraLayer],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> LoadedAdapter:
    """Copy an adapter's weights to the device, in this dtype. On a CPU only padded weights are copied.

    Weights of experts stay in float32. Raises ServerError if the weights do not fit the base model.
    """
    rank = padded_rank(state.lora.rank)
    names = sorted({name.removeprefix("weights/").rpartition(".")[0] for name in state.tensors if _is_weight(name)})
    for name in names:
        if name not in layers:
            raise ServerError(f"Adapter {key} has weights for {name}, which the base model does not have.")
    scale = state.lora.alpha / state.lora.rank
    deltas, own = {}, {}
    for name in names:
        lora_A, lora_B = _matrices(key, name, state, layers[name])
        if isinstance(layers[name], ExpertProjection):
            own[name] = OwnDelta(lora_A.to(device), lora_B.to(device), scale)
        elif dtype == torch.float32:
            deltas[name] = _delta(lora_A, lora_B, rank, scale, device)
            own[name] = _own(deltas[name], state.lora.rank, scale)
        else:  # the scale is multiplied before the weights are rounded
            deltas[name] = _delta(lora_A.to(dtype), (lora_B * scale).to(dtype), rank, 1.0, device)
            own[name] = _own(deltas[name], state.lora.rank, 1.0)
    return LoadedAdapter(key, next(_serials), AdapterShape(rank, tuple(names)), deltas, own)


def padded_rank(rank: int) -> int:
    """Return the rank to which an adapter of this rank is padded."""
    return next((padded for padded in PADDED_RANKS if rank <= padded), rank)


AdapterRun = tuple[LoadedAdapter, int]
"""Consecutive rows, or tokens, of one adapter."""


def route_by_products(runs: Sequence[AdapterRun], modules: Sequence[str]) -> Mapping[str, OwnProduct]:
    """Return the route by products.

    In each module, one product covers all tokens, and each run of rows has products with the adapter of the run.
    """
    ends = list(itertools.accumulate(count for _, count in runs))
    spans = [(adapter, end - count, end) for (adapter, count), end in zip(runs, ends, strict=True)]
    return {
        name: AdapterProducts(
            [(start, end, own) for adapter, start, end in spans if (own := adapter.own.get(name)) is not None],
            uniform=len(runs) == 1,
        )
        for name in modules
    }


class AdapterProducts:
    """The products of one module.

    Each span of tokens has an adapter. With `uniform`, a single span covers all tokens.
    """

    __slots__ = ("_spans", "_uniform")

    def __init__(self, spans: Sequence[tuple[int, int, OwnDelta]], *, uniform: bool) -> None:
        self._spans = spans
        self._uniform = uniform

    def spans(self, tokens: int) -> Iterator[OwnSpan]:
        for start, end, own in self._spans:
            yield OwnSpan(0, tokens, own) if self._uniform else OwnSpan(start, end, own)

    def __call__(self, x: Tensor, base: nn.Linear) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = linear_product(flat, base.weight, base.bias)
        for start, end, own in self._spans:
            if self._uniform:
                _add_delta(out, flat, own)
            else:
                _add_delta(out[start:end], flat[start:end], own)
        return out.view(*x.shape[:-1], -1)


def _add_delta(out: Tensor, x: Tensor, own: OwnDelta) -> None:
    """Add the delta. Each sum is rounded once to the base model's dtype, also if the adapter is float32."""
    if out.dtype == own.lora_A.dtype:
        out.addmm_(functional.linear(x, own.lora_A), own.lora_B.T, alpha=own.scale)
    else:
        out += functional.linear(functional.linear(x.to(own.lora_A.dtype), own.lora_A) * own.scale, own.lora_B)


def moves_into_runs(groups: Sequence[int | None]) -> list[tuple[int, int]]:
    """Return moves of rows (from, to), after which used rows come first and the rows of each group are adjacent.

    In `groups`, None stands for an idle row. If one row was added or removed, at most one row of each group moves.
    """
    sizes = Counter(group for group in groups if group is not None)
    order = [group for group in sorted(sizes) for _ in range(sizes[group])]
    stays = [place < len(order) and order[place] == group for place, group in enumerate(groups)]
    movers: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        if group is not None and not stays[row]:
            movers.setdefault(group, []).append(row)
    return [(movers[group].pop(0), place) for place, group in enumerate(order) if not stays[place]]


class RowAdapters:
    """The stacked route of one batch. Most batches have only one adapter; in this case, no weights are copied.

    The products have one shape for any number of rows that share an adapter.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._uniform: tuple[LoadedAdapter, int, Route] | None = None
        self._stack: dict[str, StackedDelta] = {}
        self._stacked: list[LoadedAdapter | None] = [None] * rows

    def route(self, adapters: Sequence[LoadedAdapter | None], rows: int) -> Route:
        """Return the route of the first `rows` rows.

        In `adapters`, None stands for an idle row, which may use any adapter.
        """
        used = {adapter.serial: adapter for adapter in adapters if adapter is not None}
        if len(used) <= 1:
            adapter = next(iter(used.values()), BASE_MODEL)
            return self._uniform_route(adapter, rows)
        return self._stacked_route(adapters, rows)

    def _uniform_route(self, adapter: LoadedAdapter, rows: int) -> Route:
        self._stack, self._stacked = {}, [None] * self._rows
        if self._uniform is None or self._uniform[0] is not adapter or self._uniform[1] != rows:
            self._uniform = (adapter, rows, adapter.route(rows))
        return self._uniform[2]

    def _stacked_route(self, adapters: Sequence[LoadedAdapter | None], rows: int) -> Route:
        self._fill(adapters)
        stacked = {
            name: StackedDelta(delta.lora_A[:rows], delta.lora_B[:rows], delta.scale[:rows])
            for name, delta in self._stack.items()
        }
        return {**stacked, **_of_rows(adapters[:rows])}

    def _fill(self, adapters: Sequence[LoadedAdapter | None]) -> None:
        self._uniform = None
        for row, adapter in enumerate(adapters):
            if adapter is not None and adapter is not self._stacked[row]:
                self._copy_in(row, adapter)

    def _copy_in(self, row: int, adapter: LoadedAdapter) -> None:
        if not self._stack:
            self._stack = {name: _zeros_like(delta, self._rows) for name, delta in adapter.deltas.items()}
        for name, delta in adapter.deltas.items():
            into = self._stack[name]
            into.lora_A[row] = delta.lora_A[0]
            into.lora_B[row] = delta.lora_B[0]
            into.scale[row] = delta.scale[0]
        self._stacked[row] = adapter


def _of_rows(adapters: Sequence[LoadedAdapter | None]) -> Mapping[str, AdapterProducts]:
    """Return the products of experts' projections for rows that have one token each.

    Consecutive rows of one adapter are one span.
    """
    runs = [(adapter, len(list(same))) for adapter, same in itertools.groupby(adapters)]
    used = [adapter for adapter, _ in runs if adapter is not None]
    names = {name for adapter in used for name in adapter.own if name not in adapter.deltas}
    ends = list(itertools.accumulate(rows for _, rows in runs))
    return {
        name: AdapterProducts(
            [
                (end - rows, end, adapter.own[name])
                for (adapter, rows), end in zip(runs, ends, strict=True)
                if adapter is not None and name in adapter.own
            ],
            uniform=False,
        )
        for name in sorted(names)
    }


def _is_weight(name: str) -> bool:
    return name.startswith("weights/")


def _matrices(key: str, name: str, state: AdapterState, layer: LoraLayer) -> tuple[Tensor, Tensor]:
    shape_A, shape_B = layer.lora_shapes(state.lora.rank)
    return (
        _tensor(key, f"weights/{name}.lora_A", state, shape_A),
        _tensor(key, f"weights/{name}.lora_B", state, shape_B),
    )


def _delta(lora_A: Tensor, lora_B: Tensor, padded: int, scale: float, device: torch.device) -> StackedDelta:
    more = padded - len(lora_A)
    wide_A = functional.pad(lora_A, (0, 0, 0, more)) if more else lora_A
    wide_B = functional.pad(lora_B, (0, more)) if more else lora_B
    factor = torch.full((1, 1, 1), scale, dtype=lora_A.dtype, device=device)
    return StackedDelta(wide_A[None].to(device), wide_B[None].to(device), factor)


def _own(delta: StackedDelta, rank: int, scale: float) -> OwnDelta:
    return OwnDelta(delta.lora_A[0, :rank], delta.lora_B[0, :, :rank], scale)


def _tensor(key: str, name: str, state: AdapterState, shape: tuple[int, ...]) -> Tensor:
    array = state.tensors.get(name)
    if array is None or array.shape != shape:
        found = "is missing" if array is None else f"has shape {list(array.shape)}"
        raise ServerError(f"Adapter {key}: {name} {found}; the base model needs {list(shape)}.")
    # BLAS may choose its kernel by the alignment of the data. Another alignment would give other bits than in other
    # rows or processes.
    is_usable = array.flags.c_contiguous and array.flags.writeable and array.dtype == np.float32
    return torch.from_numpy(array) if is_usable and is_aligned(array) else torch.tensor(array, dtype=torch.float32)


def _expanded(delta: StackedDelta, rows: int) -> StackedDelta:
    return StackedDelta(
        delta.lora_A.expand(rows, -1, -1), delta.lora_B.expand(rows, -1, -1), delta.scale.expand(rows, -1, -1)
    )


def _zeros_like(delta: StackedDelta, rows: int) -> StackedDelta:
    return StackedDelta(
        torch.zeros_like(delta.lora_A).repeat(rows, 1, 1),
        torch.zeros_like(delta.lora_B).repeat(rows, 1, 1),
        torch.zeros_like(delta.scale).repeat(rows, 1, 1),
    )
