"""What of a transformers config decides a Megatron model, and which models that can be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith_trainer.engines.nemo_rl.parallelism import Parallelism
from tinsmith_trainer.errors import ModelDirectoryInvalid

FAMILIES = ("llama", "qwen3")
# Frequencies that depend on nothing but the config; the others change with the sequence's length, or scale attention.
ROTARY_TYPES = ("default", "linear", "llama3")


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


def read_architecture(directory: Path, config: Any) -> Architecture:
    """Raises ModelDirectoryInvalid for a model that Megatron's layers, as they are put together here, are not."""
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
        query_key_norms=config.model_type == "qwen3",
        tied_embeddings=bool(config.tie_word_embeddings),
    )


def _check_family(directory: Path, config: Any) -> None:
    if config.model_type not in FAMILIES:
        raise ModelDirectoryInvalid(
            f"The nemo-rl engine on the CPU runs models of the families {' and '.join(FAMILIES)}; {directory} is of "
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
            f"The nemo-rl engine on the CPU cannot run the model in {directory}: it has {' and '.join(found)}. "
            "Use the peft engine, or GPUs."
        )


def _rotary(config: Any) -> dict[str, Any]:
    return dict(config.rope_parameters or {})


def _rotary_type(config: Any) -> str:
    return str(_rotary(config).get("rope_type", "default"))


def check_divisible(directory: Path, architecture: Architecture, parallelism: Parallelism) -> None:
    """Raises ModelDirectoryInvalid where tensor or pipeline ranks cannot have equal parts of the model."""
    tensor, pipeline = parallelism.tensor, parallelism.pipeline
    parts = {
        "attention heads": (architecture.heads, tensor, "tensor"),
        "key and value heads": (architecture.kv_heads, tensor, "tensor"),
        "intermediate features": (architecture.intermediate_size, tensor, "tensor"),
        "layers": (architecture.layers, pipeline, "pipeline"),
    }
    for what, (count, ranks, dimension) in parts.items():
        if count % ranks:
            raise ModelDirectoryInvalid(
                f"The model in {directory} has {count} {what}, which do not divide among {ranks} {dimension} ranks. "
                f"Choose a number of {dimension} ranks that divides {count}."
            )


def check_cpu_dimensions(parallelism: Parallelism) -> None:
    """Raises ValueError for dimensions that need attention and expert kernels of a GPU."""
    for name in ("context", "expert"):
        if (count := getattr(parallelism, name)) > 1:
            raise ValueError(
                f"Ranks on the CPU cannot divide a model by {name}, which was set to {count}: it needs kernels that "
                f"only GPUs have. Set {name} to 1."
            )
