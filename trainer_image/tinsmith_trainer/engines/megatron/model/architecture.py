"""The part of a transformers configuration that defines a Megatron model, and the supported models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.errors import ModelDirectoryInvalid

FAMILIES = ("llama", "qwen3", "qwen3_moe")
MIXTURES = ("qwen3_moe",)
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The keys that give the number of experts in a layer, for all model families."""
# Frequencies that depend only on the config. The others change with the sequence's length, or scale attention.
ROTARY_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts that replace the feed-forward of every layer.

    Each token is routed to the `chosen` most probable experts. The results of the experts are weighted by the
    probabilities. If `renormalised`, the probabilities are scaled to a sum of 1.
    """

    experts: int
    chosen: int
    intermediate_size: int
    renormalised: bool


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder with grouped queries, a gated SiLU feed-forward, RMS norms and rotary positions."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    max_sequence_length: int
    norm_epsilon: float
    query_key_norms: bool
    tied_embeddings: bool
    mixture: Mixture | None = None


def read_architecture(directory: Path, config: Any) -> Architecture:
    """Read the sizes. Raises ModelDirectoryInvalid for a model that Tinsmith's layers in Megatron do not implement."""
    _check_family(directory, config)
    return Architecture(
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        norm_epsilon=config.rms_norm_eps,
        query_key_norms=config.model_type in ("qwen3", "qwen3_moe"),
        tied_embeddings=bool(config.tie_word_embeddings),
        mixture=read_mixture(directory, config),
    )


def read_mixture(directory: Path, config: Any) -> Mixture | None:
    """Return the mixture, or None for a dense model. Raises ModelDirectoryInvalid for unsupported mixtures."""
    if not any(getattr(config, name, None) for name in EXPERT_COUNTS):
        return None
    if config.model_type not in MIXTURES or _is_partly_dense(config):
        raise ModelDirectoryInvalid(
            f"Ranks of Megatron support mixtures of experts of the family {', '.join(MIXTURES)} with experts in every "
            f"layer; {directory} is of {config.model_type!r}{_dense_too(config)}. Use the peft engine."
        )
    return Mixture(
        experts=config.num_experts,
        chosen=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        renormalised=bool(config.norm_topk_prob),
    )


def _check_family(directory: Path, config: Any) -> None:
    if config.model_type not in FAMILIES:
        raise ModelDirectoryInvalid(
            f"Ranks of Megatron on CPUs support models of the families {', '.join(FAMILIES)}; {directory} is of "
            f"{config.model_type!r}. Use the peft engine, or GPUs."
        )
    unsupported = {
        "biases in its layers": getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False),
        f"the activation {config.hidden_act!r}": config.hidden_act not in ("silu", "swish"),
        "a sliding window": bool(getattr(config, "use_sliding_window", False)),
        f"rotary positions of the type {_rotary_type(config)!r}": _rotary_type(config) not in ROTARY_TYPES,
        "rotary positions in a part of each head": _rotary(config).get("partial_rotary_factor", 1.0) != 1.0,
    }
    if found := [what for what, is_there in unsupported.items() if is_there]:
        raise ModelDirectoryInvalid(
            f"Ranks of Megatron on CPUs do not support the model in {directory}: it has {' and '.join(found)}. "
            "Use the peft engine, or GPUs."
        )


def _dense_too(config: Any) -> str:
    return ", and has layers without them" if _is_partly_dense(config) else ""


def _is_partly_dense(config: Any) -> bool:
    return bool(getattr(config, "mlp_only_layers", None)) or getattr(config, "decoder_sparse_step", 1) != 1


def _rotary(config: Any) -> dict[str, Any]:
    return dict(config.rope_parameters or {})


def _rotary_type(config: Any) -> str:
    return str(_rotary(config).get("rope_type", "default"))


def check_divisible(directory: Path, architecture: Architecture, parallelism: Parallelism) -> None:
    """Raise ModelDirectoryInvalid if the model cannot be divided equally among tensor, pipeline or expert ranks."""
    tensor, pipeline, expert, mixture = (
        parallelism.tensor,
        parallelism.pipeline,
        parallelism.expert,
        architecture.mixture,
    )
    if mixture is None and expert > 1:
        raise ModelDirectoryInvalid(
            f"The model in {directory} has no experts to divide among {expert} ranks. Set expert parallelism to 1."
        )
    if mixture is not None and tensor > 1:
        raise ModelDirectoryInvalid(
            f"Ranks on the CPU cannot divide the matrices of a mixture of experts such as {directory}. Set tensor "
            f"parallelism to 1, and divide the experts by expert parallelism."
        )
    parts = {
        "attention heads": (architecture.heads, tensor, "tensor"),
        "key and value heads": (architecture.kv_heads, tensor, "tensor"),
        "intermediate features": (architecture.intermediate_size, tensor, "tensor"),
        "layers": (architecture.layers, pipeline, "pipeline"),
        "experts": (mixture.experts if mixture else expert, expert, "expert"),
    }
    for what, (count, ranks, dimension) in parts.items():
        if count % ranks:
            raise ModelDirectoryInvalid(
                f"The model in {directory} has {count} {what}, which do not divide among {ranks} {dimension} ranks. "
                f"Choose a number of {dimension} ranks that divides {count}."
            )


def check_cpu_dimensions(parallelism: Parallelism) -> None:
    """Raise ValueError for a dimension of parallelism that needs a GPU's attention kernels."""
    if (count := parallelism.context) > 1:
        raise ValueError(
            f"Ranks on the CPU do not support context parallelism, which was set to {count}: it needs kernels of GPUs. "
            f"Set context to 1."
        )
