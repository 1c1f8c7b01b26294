"""An adapter's part of a forward, and the deltas that the adapters of a forward add to each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_trainer.engines.batching import MicrobatchArrays, MicrobatchShape
from tinsmith_trainer.engines.losses import PreparedLoss
from tinsmith_trainer.engines.peft.adapter import Adapter
from tinsmith_trainer.engines.peft.grouped_lora import (
    GroupedDeltas,
    StackedDeltas,
    StackedGradients,
    TokenGroups,
    TrainedDelta,
)
from tinsmith_trainer.engines.peft.logprobs import Head, takes_tiles
from tinsmith_trainer.engines.peft.settings import PeftEngineSettings
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.lora import UNEMBED_NAME, DeltasApart, OwnDelta, Route, StackedLoraLinear
from tinsmith_trainer.torch_model.packing import Packing

Leaves = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Share:
    """An adapter's part of a forward. Its flat gradient adds up in `scratch`; None computes the forward only.

    A share with `image_inputs`, which the model's forward takes in addition to tokens, runs alone.
    """

    adapter: Adapter
    shape: MicrobatchShape
    arrays: MicrobatchArrays
    loss: PreparedLoss
    scratch: Tensor | None
    image_inputs: Mapping[str, Tensor] | None = None


def plan_layout(shares: Sequence[Share], settings: PeftEngineSettings) -> Packing | None:
    """Return the packing, or None for rows of one length."""
    if not shares[0].shape.packed:
        return None
    lengths = [length for share in shares for length in share.shape.lengths]
    return Packing(lengths, filled_to=1) if settings.numerics == "fast" else Packing(lengths)


def joins_shares(torch_model: TorchModel, settings: PeftEngineSettings) -> bool:
    """Return whether shares have one product with the output projection, and one loss where they have the same."""
    return settings.numerics == "fast" and not takes_tiles(torch_model.unembed)


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """The deltas of all layers but the output projection, and those of that projection.

    The projection has one delta for each share, or one for all of them if they are joined. `collected`: gradients of
    adapters of one layout, which have to be added to the shares' scratch after backward.
    """

    route: Route
    heads: Sequence[Head]
    collected: StackedGradients | None = None

    def add_collected(self, shares: Sequence[Share]) -> None:
        """Add the collected gradients to the scratch of the shares, which are those of the plan."""
        if self.collected is not None:
            memories = [share.scratch for share in shares if share.scratch is not None]
            self.collected.add_to(shares[0].adapter.layout, memories)


def plan_route(
    torch_model: TorchModel, shares: Sequence[Share], layout: Packing | None, settings: PeftEngineSettings
) -> RoutePlan:
    plan = _grouped if settings.numerics == "fast" else _apart
    return plan(torch_model, shares, layout, settings)


def product_tokens(torch_model: TorchModel, share: Share, settings: PeftEngineSettings) -> int | None:
    """Return the product size that makes bits independent of other shares on the CPU; None for one whole product."""
    is_divided = settings.numerics == "exact" and torch_model.device.type == "cpu"
    return share.shape.product_tokens if is_divided else None


def _apart(
    torch_model: TorchModel, shares: Sequence[Share], layout: Packing | None, settings: PeftEngineSettings
) -> RoutePlan:
    """Route all layers that LoRA may cover, so that a share has separate products even in untrained layers."""
    leaves = [_leaves(share, share.adapter.layout.modules, settings) for share in shares]
    filling = (layout.filling,) if layout is not None and layout.filling else ()
    tokens = (*(share.shape.tokens for share in shares), *filling)
    part = product_tokens(torch_model, shares[0], settings)
    padding_deltas = (None,) * len(filling)
    route = {
        module: DeltasApart((*_own(shares, leaves, module), *padding_deltas), tokens, part)
        for module in (*torch_model.layers, *torch_model.frozen_layers)
        if module != UNEMBED_NAME
    }
    return RoutePlan(route, _own(shares, leaves, UNEMBED_NAME))


def _grouped(
    torch_model: TorchModel, shares: Sequence[Share], layout: Packing | None, settings: PeftEngineSettings
) -> RoutePlan:
    """Route each linear layer to one product for all adapters. Experts stay separate."""
    assert layout is None or not layout.filling, "there is no padding after grouped tokens"
    joins, layers = joins_shares(torch_model, settings), torch_model.layers
    is_grouped = {
        name: isinstance(layer, StackedLoraLinear) and (joins or name != UNEMBED_NAME) for name, layer in layers.items()
    }
    leaves = [_leaves(share, [name for name, own in is_grouped.items() if not own], settings) for share in shares]
    trained = _TrainedTensors.of(shares, settings)
    groups = TokenGroups.of(
        [share.shape.tokens for share in shares],
        [share.adapter.scaling for share in shares],
        trained.flats[0],
        trains=shares[0].scratch is not None,
    )
    route: dict[str, GroupedDeltas | StackedDeltas | DeltasApart] = {
        name: trained.layer(name, groups) if grouped else DeltasApart(_own(shares, leaves, name), groups.sizes, None)
        for name, grouped in is_grouped.items()
        if name != UNEMBED_NAME
    }
    heads: Sequence[Head] = [trained.head(UNEMBED_NAME, groups)] if joins else _own(shares, leaves, UNEMBED_NAME)
    return RoutePlan(route, heads, trained.collected)


@dataclass(frozen=True, slots=True)
class _TrainedTensors:
    """The adapters' tensors in the products' dtype, cast at once.

    `flats`: the flat buffer of each share. `stack`: views `[shares, ...]` of these buffers by name, if they are cast,
    several, and of one layout; then `collected` takes their gradients.
    """

    shares: Sequence[Share]
    flats: Sequence[Tensor]
    stack: Leaves | None = None
    collected: StackedGradients | None = None

    @classmethod
    def of(cls, shares: Sequence[Share], settings: PeftEngineSettings) -> _TrainedTensors:
        flats, layout = [share.adapter.weights.data for share in shares], shares[0].adapter.layout
        if settings.lora_products != "bfloat16":
            return cls(shares, flats)
        kinds = {(share.adapter.layout.modules, share.adapter.lora.rank) for share in shares}
        if len(shares) == 1 or len(kinds) > 1:
            return cls(shares, [flat.to(torch.bfloat16) for flat in flats])
        stack = flats[0].new_empty((len(flats), layout.size), dtype=torch.bfloat16)
        rows = stack.unbind()
        for row, flat in zip(rows, flats, strict=True):
            row.copy_(flat)
        return cls(shares, rows, layout.stacked_views(stack), StackedGradients())

    def layer(self, module: str, groups: TokenGroups) -> GroupedDeltas | StackedDeltas:
        """Return the deltas of a layer, which takes all tokens once."""
        stack = self._stack(module)
        if stack is None or self.collected is None:
            return self.head(module, groups)
        return StackedDeltas(groups, module, stack, self.collected)

    def head(self, module: str, groups: TokenGroups) -> GroupedDeltas:
        """Return the deltas of a module whose gradients are added to each adapter's memory in parts."""
        deltas = tuple(self._delta(share, flat, module) for share, flat in zip(self.shares, self.flats, strict=True))
        return GroupedDeltas(groups, deltas, self._stack(module))

    def _stack(self, module: str) -> tuple[Tensor, Tensor] | None:
        if self.stack is None or f"{module}.lora_A" not in self.stack:
            return None
        return self.stack[f"{module}.lora_A"], self.stack[f"{module}.lora_B"]

    @staticmethod
    def _delta(share: Share, flat: Tensor, module: str) -> TrainedDelta | None:
        layout = share.adapter.layout
        if f"{module}.lora_A" not in layout.slots:
            return None
        values = [layout.view(flat, f"{module}.{part}") for part in ("lora_A", "lora_B")]
        if share.scratch is None:
            return TrainedDelta(values[0], values[1], share.adapter.scaling, None, None)
        grads = [layout.view(share.scratch, f"{module}.{part}") for part in ("lora_A", "lora_B")]
        return TrainedDelta(values[0], values[1], share.adapter.scaling, grads[0], grads[1])


def _leaves(share: Share, modules: Iterable[str], settings: PeftEngineSettings) -> Leaves:
    """Return the tensors of these modules as leaves, cast to the products' dtype.

    The `.grad` of a leaf is a view of the scratch, so backward adds in place. Gradients pass through the cast, and add
    up in float32.
    """
    views, layout = share.adapter.views, share.adapter.layout
    names = [f"{module}.{part}" for module in modules for part in ("lora_A", "lora_B")]
    named = {name: views[name] for name in names if name in views}
    if share.scratch is not None:
        named = {name: view.detach().requires_grad_() for name, view in named.items()}
        for name, leaf in named.items():
            leaf.grad = layout.view(share.scratch, name)
    if settings.lora_products != "bfloat16":
        return named
    return {name: leaf.to(torch.bfloat16) for name, leaf in named.items()}


def _own(shares: Sequence[Share], leaves: Sequence[Leaves], module: str) -> tuple[OwnDelta | None, ...]:
    name_A, name_B = f"{module}.lora_A", f"{module}.lora_B"
    return tuple(
        OwnDelta(own[name_A], own[name_B], share.adapter.scaling) if name_A in own else None
        for share, own in zip(shares, leaves, strict=True)
    )
