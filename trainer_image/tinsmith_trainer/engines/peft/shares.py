"""An adapter's part of a forward, and the deltas that the adapters of a forward add to each layer."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_trainer.engines.batching import MicrobatchArrays, MicrobatchShape
from tinsmith_trainer.engines.losses import PreparedLoss
from tinsmith_trainer.engines.peft.adapter import Adapter
from tinsmith_trainer.engines.peft.grouped_lora import GroupedDeltas, TokenGroups, TrainedDelta
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


def plan_route(
    torch_model: TorchModel, shares: Sequence[Share], layout: Packing | None, settings: PeftEngineSettings
) -> tuple[Route, Sequence[OwnDelta | None]]:
    """Return the deltas of all layers but the output projection, and each share's delta of that projection."""
    plan = _grouped if settings.numerics == "fast" else _apart
    return plan(torch_model, shares, layout, settings)


def product_tokens(torch_model: TorchModel, share: Share, settings: PeftEngineSettings) -> int | None:
    """Return the product size that makes bits independent of other shares on the CPU; None for one whole product."""
    is_divided = settings.numerics == "exact" and torch_model.device.type == "cpu"
    return share.shape.product_tokens if is_divided else None


def _apart(
    torch_model: TorchModel, shares: Sequence[Share], layout: Packing | None, settings: PeftEngineSettings
) -> tuple[Route, Sequence[OwnDelta | None]]:
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
    return route, _own(shares, leaves, UNEMBED_NAME)


def _grouped(
    torch_model: TorchModel, shares: Sequence[Share], layout: Packing | None, settings: PeftEngineSettings
) -> tuple[Route, Sequence[OwnDelta | None]]:
    """Route each linear layer to one product for all adapters. Experts and the output projection stay separate."""
    assert layout is None or not layout.filling, "there is no padding after grouped tokens"
    layers = torch_model.layers
    is_grouped = {name: isinstance(layer, StackedLoraLinear) and name != UNEMBED_NAME for name, layer in layers.items()}
    separate = {name for name, grouped in is_grouped.items() if not grouped}
    leaves = [_leaves(share, separate, settings) for share in shares]
    trained = [_TrainedTensors.of(share, settings) for share in shares]
    groups = TokenGroups.of(
        [share.shape.tokens for share in shares],
        [share.adapter.scaling for share in shares],
        next(iter(trained[0].values.values())),
        trains=shares[0].scratch is not None,
    )
    route: dict[str, GroupedDeltas | DeltasApart] = {
        name: GroupedDeltas(groups, tuple(each.delta(name) for each in trained))
        if grouped
        else DeltasApart(_own(shares, leaves, name), groups.sizes, None)
        for name, grouped in is_grouped.items()
        if name != UNEMBED_NAME
    }
    return route, _own(shares, leaves, UNEMBED_NAME)


@dataclass(frozen=True, slots=True)
class _TrainedTensors:
    """An adapter's tensors in the products' dtype, cast at once, and the memory of their gradients in float32."""

    values: Leaves
    gradients: Leaves | None
    scale: float

    @classmethod
    def of(cls, share: Share, settings: PeftEngineSettings) -> _TrainedTensors:
        layout, weights = share.adapter.layout, share.adapter.weights.data
        flat = weights.to(torch.bfloat16) if settings.lora_products == "bfloat16" else weights
        gradients = None if share.scratch is None else layout.views(share.scratch)
        return cls(layout.views(flat), gradients, share.adapter.scaling)

    def delta(self, module: str) -> TrainedDelta | None:
        name_A, name_B = f"{module}.lora_A", f"{module}.lora_B"
        if name_A not in self.values:
            return None
        grad_A, grad_B = (None, None) if self.gradients is None else (self.gradients[name_A], self.gradients[name_B])
        return TrainedDelta(self.values[name_A], self.values[name_B], self.scale, grad_A, grad_B)


def _leaves(share: Share, modules: Container[str], settings: PeftEngineSettings) -> Leaves:
    """Return the tensors of these modules as leaves, cast to the products' dtype.

    The `.grad` of a leaf is a view of the scratch, so backward adds in place. Gradients pass through the cast, and add
    up in float32.
    """
    named = {name: view for name, view in share.adapter.views.items() if name.rpartition(".")[0] in modules}
    if share.scratch is not None:
        named = {name: view.detach().requires_grad_() for name, view in named.items()}
        for name, gradient in share.adapter.layout.views(share.scratch).items():
            if name in named:
                named[name].grad = gradient
    if settings.lora_products != "bfloat16":
        return named
    return {name: leaf.to(torch.bfloat16) for name, leaf in named.items()}


def _own(shares: Sequence[Share], leaves: Sequence[Leaves], module: str) -> tuple[OwnDelta | None, ...]:
    name_A, name_B = f"{module}.lora_A", f"{module}.lora_B"
    return tuple(
        OwnDelta(own[name_A], own[name_B], share.adapter.scaling) if name_A in own else None
        for share, own in zip(shares, leaves, strict=True)
    )
