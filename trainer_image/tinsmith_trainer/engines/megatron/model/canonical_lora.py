"""LoRA in PEFT's layout on Megatron-Bridge's models. Each projection has a separate A and B, even in fused layers.

Megatron-Bridge's `LoRA` has one A for query, key and value, so a PEFT adapter does not fit `LoRA`. Megatron-Bridge's
`CanonicalLoRA` (`megatron/bridge/peft/canonical_lora.py`) has a separate A for query, key and value. Each layer of
`CanonicalLoRA` is a module with `to_wrap`, the frozen layer, and `adapter`: one `ParallelLinearAdapter`
(`megatron/bridge/peft/utils.py`), or several adapters by name. A `ParallelLinearAdapter` has `linear_in` (A) and
`linear_out` (B), and scales by `alpha / dim`.

For the experts of a mixture, `CanonicalLoRA` has one adapter for all experts of a rank, or both factors for each
expert; gate and up share one adapter. So experts get Tinsmith's adapters (`expert_lora.py`), which are added at the
same step of building a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from typing_extensions import override

from tinsmith_trainer.engines.megatron.model.expert_lora import ExpertSizes, ExpertsLora, place_experts
from tinsmith_trainer.engines.megatron.model.lora import COLUMNS, ROWS, LoraTensor
from tinsmith_trainer.engines.megatron.model.ranked_model import EXPERTS
from tinsmith_trainer.engines.megatron.model.weights import Part
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.step.adapter_route import AdapterRoute, Share
from tinsmith_trainer.engines.megatron.step.rank import LoraTarget, Rank, Schedule
from tinsmith_trainer.engines.megatron.step.train_step import AdapterStep
from tinsmith_trainer.errors import ModelDirectoryInvalid

log = structlog.get_logger(__name__)

OF_LAYER = "mlp.experts"
"""The path of a layer's experts within the layer."""

_ONLY = ""
_PROJECTIONS: Mapping[tuple[str, str], str] = {
    ("self_attention.linear_qkv", "adapter_q"): "self_attn.q_proj",
    ("self_attention.linear_qkv", "adapter_k"): "self_attn.k_proj",
    ("self_attention.linear_qkv", "adapter_v"): "self_attn.v_proj",
    ("self_attention.linear_proj", _ONLY): "self_attn.o_proj",
    ("mlp.linear_fc1", "adapter_gate"): "mlp.gate_proj",
    ("mlp.linear_fc1", "adapter_up"): "mlp.up_proj",
    ("mlp.linear_fc2", _ONLY): "mlp.down_proj",
}
_UNEMBED = "lm_head"
_LAYER = re.compile(r"(?P<layer>(?:.*\.)?decoder\.layers\.\d+)\.(?P<linear>.+)")


def canonical_lora(*, target_modules: Sequence[str], dim: int) -> Any:
    """Return the object with which Megatron-Bridge adds adapters to a model. The scale of new adapters is 1.

    `target_modules` are Megatron-Bridge's names, as in `RankedModel`; all adapters are padded to rank `dim`.
    """
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA

    class WithExperts(CanonicalLoRA):  # type: ignore[misc]
        """A transformation of a model's modules.

        The transformation is called for each module by name, outer modules first.
        """

        @override
        def transform(self, m: Any, name: str | None = None, prefix: str | None = None) -> Any:
            if name == EXPERTS and EXPERTS in target_modules:
                place_experts(m, _experts_lora(m, dim))
                return m
            return super().transform(m, name, prefix)

    return WithExperts(target_modules=list(target_modules), dim=dim, alpha=dim, dropout=0.0)


def _experts_lora(experts: Any, dim: int) -> ExpertsLora:
    """Build the adapters of a SequentialMLP or TEGroupedMLP of Megatron, which has no layer name."""
    config = experts.config
    sizes = ExpertSizes(config.num_moe_experts, config.hidden_size, config.moe_ffn_hidden_size)
    part = Part(experts.ep_group.rank(), experts.ep_group.size())
    return ExpertsLora(OF_LAYER, sizes, part, dim, like=next(experts.parameters()))


class RoutedAdapter(nn.Module):
    """An adapter of one projection, which computes the rows of each call with the tensors of the call's adapter.

    This module is not a part of the model: it replaces `forward` of the adapter, whose parameters keep their names.
    Each share has separate products and exchanges between tensor ranks, which are the adapter's own.
    """

    def __init__(self, adapter: Any, name: str, route: AdapterRoute) -> None:
        super().__init__()
        self.adapter = adapter
        self._name = name
        self._route = route
        self._plain = adapter.forward
        adapter.forward = self._routed

    def _routed(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        shares = self._route.shares
        if not shares:
            plain: Tensor = self._plain(x)
            return plain
        return torch.cat([self._delta(share, share.of(x)) for share in shares], dim=shares[0].dimension)

    def _delta(self, share: Share, x: Tensor) -> Tensor:
        self.adapter.alpha = share.scale * self.adapter.dim
        tensors = {
            "adapter.linear_in.weight": share.tensors[f"{self._name}.lora_A"],
            "adapter.linear_out.weight": share.tensors[f"{self._name}.lora_B"],
        }
        delta: Tensor = torch.func.functional_call(self, tensors, (x.contiguous(),))
        return delta

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Compute the delta with the tensors that `functional_call` puts in the place of the adapter's own."""
        delta: Tensor = self._plain(x)
        return delta


@dataclass(frozen=True, slots=True)
class CanonicalLora:
    """The adapter weights in a pipeline stage, for one adapter at a time.

    `tensors` are sorted by name. `route` lets a forward use other adapters.
    """

    tensors: tuple[LoraTensor, ...]
    route: AdapterRoute
    _adapters: tuple[Any, ...]
    _experts: tuple[ExpertsLora, ...]

    def set_scale(self, scale: float) -> None:
        """Set the scale of the current adapter: alpha divided by the rank before padding."""
        for adapter in self._adapters:
            adapter.alpha = scale * adapter.dim
        for experts in self._experts:
            experts.scale = scale


def adapted_rank(
    chunk: Any, optimizer: Any, make_schedule: Callable[[], Schedule], parallelism: Parallelism, number: int
) -> Rank:
    """Build a rank from a part of a model to which Megatron-Bridge added adapters.

    `chunk` is Megatron's DistributedDataParallel around this part, and `optimizer` is an optimizer of Megatron.
    `make_schedule` may change the model's output layer. Raises ModelDirectoryInvalid, and ValueError for a model whose
    optimizer steps are not supported.
    """
    # Schedules read this in every call: stages tell each other each microbatch's shape, and none is padded.
    chunk.config.variable_seq_lengths = parallelism.pipeline > 1
    lora = find_lora(chunk, tensor_ranks=parallelism.tensor)
    step = AdapterStep(chunk, optimizer, lora.tensors)
    parts = tuple(tensor.part() for tensor in lora.tensors)
    log.info("a rank is ready", rank=number, tensors=len(parts), dtype=str(lora.tensors[0].parameter.dtype))
    return Rank(step, make_schedule(), LoraTarget(parts, lora.set_scale, lora.route), parallelism, number)


def find_lora(model: nn.Module, *, tensor_ranks: int) -> CanonicalLora:
    """Find the adapter weights in a model.

    Raises ModelDirectoryInvalid for a layer that has no name in PEFT's layout.
    """
    found, of_experts, route = list(_adapters(model)), list(_experts(model)), AdapterRoute()
    for name, adapter in found:
        RoutedAdapter(adapter, name, route)
    tensors = [tensor for name, adapter in found for tensor in _tensors(name, adapter, tensor_ranks)]
    for layer, experts in of_experts:
        tensors += [replace(tensor, name=f"{layer}.{tensor.name}") for tensor in experts.tensors()]
    return CanonicalLora(
        tuple(sorted(tensors, key=lambda tensor: tensor.name)),
        route,
        tuple(adapter for _, adapter in found),
        tuple(experts for _, experts in of_experts),
    )


def _adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each projection's name in the transformers model, and the projection's adapter."""
    for path, module in model.named_modules():
        if isinstance(getattr(module, "to_wrap", None), nn.Module):
            adapter: Any = module.adapter
            if isinstance(adapter, nn.ModuleDict):
                for part, own in adapter.items():
                    yield _name(model, path, part), own
            else:
                yield _name(model, path, _ONLY), adapter


def _experts(model: nn.Module) -> Iterator[tuple[str, ExpertsLora]]:
    """Yield each layer's name in the transformers model, and the adapters of the layer's experts."""
    for path, module in model.named_modules():
        if isinstance(module, ExpertsLora):
            match = _LAYER.fullmatch(path)
            assert match is not None, f"experts outside the layers: {path}"
            yield _layer_name(model, match["layer"]), module


def _name(model: nn.Module, path: str, part: str) -> str:
    if path.rpartition(".")[2] == "output_layer" and part == _ONLY:
        return _UNEMBED
    match = _LAYER.fullmatch(path)
    projection = match and _PROJECTIONS.get((match["linear"], part))
    if match is None or projection is None:
        raise ModelDirectoryInvalid(
            f"The model has a linear layer {path}, which has no name in PEFT's layout. Ranks support dense "
            f"transformers and Qwen3's mixtures, without state spaces or vision towers."
        )
    return f"{_layer_name(model, match['layer'])}.{projection}"


def _layer_name(model: nn.Module, path: str) -> str:
    """Return a layer's name in the transformers model.

    Layer numbers count from 1 over all pipeline stages, but the numbers in paths count from 0 in each stage.
    """
    number: Any = model.get_submodule(path).layer_number
    return f"model.layers.{number - 1}"


def _tensors(name: str, adapter: Any, tensor_ranks: int) -> Iterator[LoraTensor]:
    """Yield A and B, divided in the same way as in `ParallelLinearAdapter.__init__`.

    B is always divided by rows. A is divided by rows (of the padded rank), or, in a row-parallel layer, by columns.
    """
    A, B = adapter.linear_in.weight, adapter.linear_out.weight
    split = COLUMNS if adapter.input_is_parallel else ROWS
    yield LoraTensor(f"{name}.lora_A", A, split, _whole(A, split, tensor_ranks))
    yield LoraTensor(f"{name}.lora_B", B, ROWS, _whole(B, ROWS, tensor_ranks))


def _whole(part: Tensor, split: int, tensor_ranks: int) -> tuple[int, int]:
    rows, columns = part.shape
    return (rows * tensor_ranks, columns) if split == ROWS else (rows, columns * tensor_ranks)
