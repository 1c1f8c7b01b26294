"""A rank's part of a base model on the CPU: Megatron's GPT model, frozen, with LoRA layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from typing_extensions import override

from tinsmith_trainer.engines.megatron.flags import RankRecompute
from tinsmith_trainer.engines.megatron.model.architecture import (
    Architecture,
    Mixture,
    check_cpu_dimensions,
    check_divisible,
    read_architecture,
)
from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
from tinsmith_trainer.engines.megatron.model.expert_lora import ExpertSizes, ExpertsLora, place_experts
from tinsmith_trainer.engines.megatron.model.lora import (
    COLUMNS,
    ROWS,
    AdaptedLayer,
    Join,
    MegatronLora,
    ParallelLora,
    Projection,
)
from tinsmith_trainer.engines.megatron.model.weights import Checkpoint, Loader, Part, interleave_groups
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.step.adapter_route import AdapterRoute
from tinsmith_trainer.torch_model.stored_weights import checked_config


class CausalAttention(nn.Module):
    """A replacement for Megatron's DotProductAttention; DotProductAttention keeps `[B, heads, S, S]` for backward.

    With four layers and rows of 2048 tokens, a step with DotProductAttention took five times as long as a step in
    transformers.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> Tensor:
        """Map `[S, B, heads, size]` to `[S, B, features]`, and packed sequences `[S, heads, size]` to `[S, features]`.

        Key and value have one head for each group of query heads.
        """
        if packed_seq_params is None:
            return _attended(query, key, value)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        by_sequence = zip(*(torch.split(heads.unsqueeze(1), lengths) for heads in (query, key, value)), strict=True)
        return torch.cat([_attended(*sequence) for sequence in by_sequence]).squeeze(1)


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (heads.permute(1, 2, 0, 3) for heads in (query, key, value))
    attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended.permute(2, 0, 1, 3).flatten(2)


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A pipeline stage's layers, divided among tensor ranks.

    `chunk` is a GPTModel with a frozen base, not yet wrapped for data parallelism. The arguments of a call are
    `input_ids` and `position_ids` (both `[B, S]`), and `attention_mask=None` (always causal). The last stage returns
    the logits of this tensor rank, `[B, S, V/TP]`, with -inf where the vocabulary is padded. Earlier stages return
    hidden states `[S, B, hidden]`.
    """

    chunk: nn.Module
    lora: MegatronLora


def initialise_parallel(parallelism: Parallelism, rank: int) -> None:
    """Set the number of this rank in Megatron, once per process.

    When torch.distributed's process group ends, Megatron's groups end, too.

    Before this call, torch.distributed must have a process group; all ranks must make the call together. Raises
    RuntimeError if the process group does not match the parallelism, and ValueError for dimensions that a CPU does not
    support.
    """
    check_cpu_dimensions(parallelism)
    if (torch.distributed.get_rank(), torch.distributed.get_world_size()) != (rank, parallelism.world_size):
        raise RuntimeError(
            f"This is rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()} in the process "
            f"group, but rank {rank} of {parallelism.world_size} for the engine."
        )
    with cpu_megatron():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallelism.tensor,
            pipeline_model_parallel_size=parallelism.pipeline,
            expert_model_parallel_size=parallelism.expert,
            expert_tensor_parallel_size=1 if parallelism.expert > 1 else None,
        )


def build_megatron_model(
    directory: Path,
    parallelism: Parallelism,
    *,
    max_rank: int,
    dtype: torch.dtype = torch.float32,
    recompute: RankRecompute = "none",
    device: str = "cpu",
) -> MegatronModel:
    """Build this rank's part of the model. Call this after `initialise_parallel`.

    The adapter is float32 for any `dtype` of the base.

    Raises ModelDirectoryInvalid for unreadable files, other families, and uneven parts.
    """
    config = checked_config(directory)
    architecture = read_architecture(directory, config)
    check_divisible(directory, architecture, parallelism)
    part = Part(parallel_state.get_tensor_model_parallel_rank(), parallelism.tensor)
    experts = Part(parallel_state.get_expert_model_parallel_rank(), parallelism.expert)
    with cpu_megatron():
        # Megatron creates weights on the CPU; they are moved before the files are copied into them.
        chunk = _build_chunk(architecture, parallelism, dtype, recompute).to(device)
        with Checkpoint(directory) as checkpoint:
            Loader(checkpoint, architecture, part, experts).load(chunk)
        _set_rotary_frequencies(chunk, config)
        chunk.requires_grad_(False)
        lora = place_lora(chunk, architecture, part, experts, max_rank)
    return MegatronModel(chunk, lora)


def _build_chunk(
    architecture: Architecture, parallelism: Parallelism, dtype: torch.dtype, recompute: RankRecompute
) -> Any:
    is_first = parallel_state.is_pipeline_first_stage()
    is_last = parallel_state.is_pipeline_last_stage()
    model = GPTModel(
        config=_transformer_config(architecture, parallelism, dtype, recompute),
        transformer_layer_spec=_layer_spec(architecture),
        vocab_size=Part(0, parallelism.tensor).width(architecture.vocab_size) * parallelism.tensor,
        max_sequence_length=architecture.max_sequence_length,
        pre_process=is_first,
        post_process=is_last,
        # Frozen weights need no shared gradient, so two stages load tied weights separately.
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    if architecture.tied_embeddings and is_first and is_last:
        model.output_layer.weight = model.embedding.word_embeddings.weight
    if recompute == "layers" and is_first:
        model.embedding.register_forward_hook(_with_gradient)
    return model.to(dtype)  # the norms of this model are float32 for any config


def _with_gradient(_module: nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
    """Make the embedding require a gradient.

    If the embedding required no gradient, layers would not be recomputed, and LoRA would get no gradient.
    """
    return embedded.detach().requires_grad_() if torch.is_grad_enabled() else embedded


def _layer_spec(architecture: Architecture) -> Any:
    spec = get_gpt_layer_local_spec(
        num_experts=architecture.mixture.experts if architecture.mixture else None,
        moe_grouped_gemm=False,
        qk_layernorm=architecture.query_key_norms,
        normalization="RMSNorm",
    )
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec


def _recompute_config(recompute: RankRecompute, mixture: Mixture | None) -> dict[str, Any]:
    if recompute == "none":
        return {}
    if recompute == "mlp":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe" if mixture else "mlp"]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _transformer_config(
    architecture: Architecture, parallelism: Parallelism, dtype: torch.dtype, recompute: RankRecompute
) -> TransformerConfig:
    """Configure Megatron: sums instead of averages, no fused kernels (which need CUDA), and no randomness."""
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.intermediate_size,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_size,
        layernorm_epsilon=architecture.norm_epsilon,
        normalization="RMSNorm",
        qk_layernorm=architecture.query_key_norms,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_softmax_in_fp32=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        tensor_model_parallel_size=parallelism.tensor,
        pipeline_model_parallel_size=parallelism.pipeline,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Microbatches have the length of their datums, so stages must send each other the shape.
        variable_seq_lengths=parallelism.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # also checked without experts: the default requires equal shapes
        bf16=dtype == torch.bfloat16,
        cuda_graph_scope=[],  # the default is deprecated, and warns at every start
        calculate_per_token_loss=True,
        **_recompute_config(recompute, architecture.mixture),
        **({} if architecture.mixture is None else _mixture_config(architecture.mixture, parallelism)),
    )


def _mixture_config(mixture: Mixture, parallelism: Parallelism) -> dict[str, Any]:
    """Configure experts without dropped tokens and without router losses."""
    return {
        "num_moe_experts": mixture.experts,
        "moe_router_topk": mixture.chosen,
        "moe_ffn_hidden_size": mixture.intermediate_size,
        # Softmax over the chosen equals softmax over all, renormalised to the chosen.
        "moe_router_pre_softmax": not mixture.renormalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": parallelism.expert,
        "expert_tensor_parallel_size": 1,
    }


def _set_rotary_frequencies(chunk: Any, config: Any) -> None:
    """Set rotary frequencies from transformers, because Megatron knows only one set of Llama 3's scaling factors."""
    chunk.rotary_pos_emb.inv_freq.copy_(LlamaRotaryEmbedding(config=config).inv_freq)


@dataclass(frozen=True, slots=True)
class _Placing:
    architecture: Architecture
    part: Part
    experts: Part
    max_rank: int
    route: AdapterRoute

    def place(
        self, owner: Any, child: str, projections: Sequence[Projection], split: int, join: Join | None = None
    ) -> ParallelLora:
        layer = ParallelLora(
            getattr(owner, child),
            projections,
            split=split,
            part=self.part,
            max_rank=self.max_rank,
            route=self.route,
            join=join,
        )
        setattr(owner, child, layer)
        return layer

    def layer(self, layer: Any) -> list[AdaptedLayer]:
        """Wrap all linear layers of a transformer layer. The number of the layer counts from 1 over the whole model."""
        name = f"model.layers.{layer.layer_number - 1}."
        return [*self._attention(layer, f"{name}self_attn."), *self._feed_forward(layer, name)]

    def _attention(self, layer: Any, attention: str) -> list[ParallelLora]:
        sizes = self.architecture
        hidden, query, key_value = sizes.hidden_size, sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
        fused = [
            Projection(f"{attention}q_proj", hidden, query),
            Projection(f"{attention}k_proj", hidden, key_value),
            Projection(f"{attention}v_proj", hidden, key_value),
        ]
        return [
            self.place(layer.self_attention, "linear_qkv", fused, ROWS, self._join_groups),
            self.place(layer.self_attention, "linear_proj", [Projection(f"{attention}o_proj", query, hidden)], COLUMNS),
        ]

    def _feed_forward(self, layer: Any, name: str) -> list[AdaptedLayer]:
        hidden, inner, mixture = (
            self.architecture.hidden_size,
            self.architecture.intermediate_size,
            self.architecture.mixture,
        )
        if mixture is not None:
            sizes = ExpertSizes(mixture.experts, hidden, mixture.intermediate_size)
            lora = ExpertsLora(f"{name}mlp.experts", sizes, self.experts, self.max_rank, like=torch.empty(0))
            place_experts(layer.mlp.experts, lora)
            return [lora]
        mlp = f"{name}mlp."
        gated = [Projection(f"{mlp}gate_proj", hidden, inner), Projection(f"{mlp}up_proj", hidden, inner)]
        return [
            self.place(layer.mlp, "linear_fc1", gated, ROWS, _side_by_side),
            self.place(layer.mlp, "linear_fc2", [Projection(f"{mlp}down_proj", inner, hidden)], COLUMNS),
        ]

    def _join_groups(self, outputs: Sequence[Tensor]) -> Tensor:
        query, key, value = outputs
        return interleave_groups(query, key, value, self.architecture.kv_heads // self.part.count, dim=-1)


def _side_by_side(outputs: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(outputs), dim=-1)


def place_lora(chunk: Any, architecture: Architecture, part: Part, experts: Part, max_rank: int) -> MegatronLora:
    """Wrap every linear layer of a GPTModel's pipeline stage in place.

    `part` is this rank's part among tensor ranks, and `experts` is this rank's part of a mixture's experts.
    """
    route = AdapterRoute()
    placing = _Placing(architecture, part, experts, max_rank, route)
    layers: list[AdaptedLayer] = [placed for layer in chunk.decoder.layers for placed in placing.layer(layer)]
    if chunk.post_process:
        unembedding = Projection("lm_head", architecture.hidden_size, architecture.vocab_size)
        layers.append(placing.place(chunk, "output_layer", [unembedding], ROWS))
    return MegatronLora(layers, route)
