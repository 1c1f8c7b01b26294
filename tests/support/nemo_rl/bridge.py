"""Megatron-Bridge's adapted layers, as far as Tinsmith looks at them, around Megatron's own on one CPU rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from tinsmith_trainer.engines.megatron.model.lora import COLUMNS, ParallelLora
from torch import Tensor, nn
from typing_extensions import override


class Adapter(nn.Module):
    """`ParallelLinearAdapter`."""

    def __init__(self, in_features: int, out_features: int, dim: int, *, input_is_parallel: bool) -> None:
        super().__init__()
        self.linear_in = nn.Linear(in_features, dim, bias=False)
        self.linear_out = nn.Linear(dim, out_features, bias=False)
        self.dim = dim
        self.alpha: float = dim
        self.input_is_parallel = input_is_parallel

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_out(self.linear_in(x)) * (self.alpha / self.dim)
        return out


class Adapted(nn.Module):
    """`LoRALinear`, and `LoRALinearSplitQKV` and `LoRALinearSplitFC1UpGate`, whose adapter is several by name."""

    def __init__(self, to_wrap: nn.Module, adapter: nn.Module, join: Any = None) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        self.adapter = adapter
        self._join = join

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.to_wrap.weight  # type: ignore[assignment]
        return weight

    @override
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.to_wrap(x, *args, **kwargs)
        if isinstance(self.adapter, nn.ModuleDict):
            return out + self._join([one(x) for one in self.adapter.values()]), bias
        return out + self.adapter(x), bias


PARTS: Mapping[str, Sequence[str]] = {
    "linear_qkv": ("adapter_q", "adapter_k", "adapter_v"),
    "linear_fc1": ("adapter_gate", "adapter_up"),
}


class ParallelAdapter(nn.Module):
    """The same of Megatron's parallel layers, divided among tensor ranks as `ParallelLinearAdapter.__init__` does."""

    def __init__(self, in_features: int, out_features: int, dim: int, config: Any, *, input_is_parallel: bool) -> None:
        super().__init__()
        self.dim = dim
        self.alpha: float = dim
        self.input_is_parallel = input_is_parallel
        config = replace(config, perform_initialization=True)
        common: dict[str, Any] = {"config": config, "bias": False}
        if input_is_parallel:
            self.linear_in: nn.Module = RowParallelLinear(
                in_features,
                dim,
                init_method=nn.init.xavier_normal_,
                input_is_parallel=True,
                skip_bias_add=True,
                **common,
            )
        else:
            self.linear_in = ColumnParallelLinear(
                in_features, dim, init_method=nn.init.xavier_normal_, gather_output=True, **common
            )
        self.linear_out = ColumnParallelLinear(
            dim, out_features, init_method=nn.init.zeros_, gather_output=input_is_parallel, **common
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.linear_in(x)
        x, _ = self.linear_out(x)
        return x * (self.alpha / self.dim)


def adapted_by_bridge(model: nn.Module, lora: Any, tensor_ranks: int = 1) -> None:
    """Replace Tinsmith's layers in a model for the CPU with those of the bridge.

    For experts it asks `lora`, the CanonicalLoRA of a worker, as the bridge does for each module.
    """
    for path, layer in list(model.named_modules()):
        owner, _, child = path.rpartition(".")
        if isinstance(layer, ParallelLora):
            setattr(model.get_submodule(owner), child, _adapted(child, layer, lora.dim, model.config, tensor_ranks))
        if isinstance(layer, SequentialMLP):
            lora.transform(_unadapted(layer), child, owner)


def _unadapted(experts: Any) -> Any:
    """Return the layers as Megatron made them."""
    del experts.adapter
    for expert in experts.local_experts:
        expert.linear_fc1, expert.linear_fc2 = expert.linear_fc1.base, expert.linear_fc2.base
    return experts


def _adapted(child: str, layer: ParallelLora, dim: int, config: Any, tensor_ranks: int) -> Adapted:
    is_row = layer.split == COLUMNS
    adapters = [
        ParallelAdapter(
            A.shape[1] * (tensor_ranks if is_row else 1),
            B.shape[0] * (1 if is_row else tensor_ranks),
            dim,
            config,
            input_is_parallel=is_row,
        )
        for A, B in zip(layer.lora_A, layer.lora_B, strict=True)
    ]
    if child not in PARTS:
        return Adapted(layer.base, adapters[0])
    return Adapted(layer.base, nn.ModuleDict(dict(zip(PARTS[child], adapters, strict=True))), layer._join)
