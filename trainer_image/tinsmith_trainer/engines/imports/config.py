"""The configuration of an adapter that was made elsewhere, held against each field of PEFT's LoraConfig.

A field is honoured, changes nothing in what the weights compute, or is refused by its name. So is a field that is in
none of the tables, because a later PEFT may compute something else with it.
"""

from __future__ import annotations

import json
import math
from typing import Any

from tinsmith_trainer.engines.peft_layout import CONFIG_FILE
from tinsmith_trainer.errors import CheckpointInvalid

MOST_ALPHA = 1e6
"""A scale far below what float32 holds, and far above any that is trained with."""
MOST_SHOWN_CHARACTERS = 100

HONOURED = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}
)
HARMLESS = frozenset(
    {
        # Names and versions: the weights are checked against the base model itself.
        *("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type"),
        # Where PEFT puts the layers: the names of the weights say so.
        *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules", "target_parameters"),
        # How PEFT trains, initializes or runs an adapter. `init_lora_weights` says which initialization was used.
        *("corda_config", "ensure_weight_tying", "eva_config", "inference_mode", "loftq_config", "lora_dropout"),
        *("lora_ga_config", "megatron_core", "qalora_group_size", "runtime_config"),
    }
)
REFUSED = {
    "alora_invocation_tokens": "aLoRA, which is active from an invocation on",
    "arrow_config": "Arrow routing",
    "fan_in_fan_out": "transposed layers",
    "kasa_config": "KaSA",
    "layer_replication": "replicated layers",
    "lora_bias": "biases",
    "megatron_config": "layers of Megatron",
    "modules_to_save": "whole modules",
    "monteclora_config": "MonteCLoRA",
    "trainable_token_indices": "embeddings of tokens",
    "use_bdlora": "BD-LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
}
"""The fields for parts besides A and B, which no model here has; a false value turns a field off."""
PLAIN_INITIALIZATIONS = ("gaussian", "eva", "orthogonal", "mica")
"""Initializations that leave the base weights alone, as true, false and null do."""
CONVERTED_INITIALIZATIONS = ("pissa", "olora", "corda", "lora_ga")
"""Initializations that subtract the first A and B from the base weights; PEFT can convert such adapters."""


def rank_and_alpha(content: bytes) -> tuple[int, float]:
    """Return the rank, and alpha for a scale of alpha / rank. Raises CheckpointInvalid."""
    not_lora = (
        f"{CONFIG_FILE} is not PEFT's for LoRA: it needs `r` and `lora_alpha`, both positive, "
        f"and alpha of {MOST_ALPHA:g} at most."
    )
    try:
        config = json.loads(content)
        rank, alpha = config["r"], float(config["lora_alpha"])
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        raise CheckpointInvalid(not_lora) from None
    if not isinstance(rank, int) or rank < 1 or not 0 < alpha <= MOST_ALPHA:
        raise CheckpointInvalid(not_lora)
    _check_fields(config)
    _check_initialization(config.get("init_lora_weights", True))
    _check_patterns(config, rank, alpha)
    return rank, alpha * math.sqrt(rank) if config.get("use_rslora") else alpha


def _check_fields(config: dict[str, Any]) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise CheckpointInvalid(f"{CONFIG_FILE} is of {_shown(config['peft_type'])}; this server has LoRA alone.")
    found = {field: what for field, what in REFUSED.items() if config.get(field)}
    if config.get("bias", "none") != "none":
        found["bias"] = "biases"
    if found:
        parts = " and ".join(dict.fromkeys(found.values()))
        raise CheckpointInvalid(
            f"{CONFIG_FILE}: the adapter has {parts} ({', '.join(found)}); this server has LoRA alone. Merge it into "
            "the base model and serve that, or train the adapter as plain LoRA."
        )
    # A field that is null is one that its PEFT does not use.
    unknown = [field for field in config.keys() - HONOURED - HARMLESS - REFUSED.keys() if config[field] is not None]
    if unknown:
        raise CheckpointInvalid(
            f"{CONFIG_FILE}: this server does not know the field {_shown(min(unknown))}, so that it cannot tell "
            "whether the adapter is plain LoRA. Remove the field if it changes nothing in what the adapter computes."
        )


def _check_initialization(value: Any) -> None:
    """Refuse adapters on base weights that their initialization has changed: added to ours, they say something else."""
    if value is None or isinstance(value, bool):
        return
    name = value.lower() if isinstance(value, str) else ""
    if name in PLAIN_INITIALIZATIONS:
        return
    if name.startswith(CONVERTED_INITIALIZATIONS):
        cure = "Save the adapter with PEFT's `path_initial_model_for_weight_conversion`, which makes it plain LoRA."
    else:
        cure = "Merge the adapter into its base model and serve that, or train it with another initialization."
    raise CheckpointInvalid(
        f"{CONFIG_FILE}: init_lora_weights is {_shown(value)}, which may change the base weights that the adapter is "
        f"added to; this server has the unchanged ones. {cure}"
    )


def _check_patterns(config: dict[str, Any], rank: int, alpha: float) -> None:
    """Layers may have another rank, as fused experts do, but an adapter here has one scale."""
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    try:
        scales = {name: alphas.get(name, alpha) / ranks.get(name, rank) for name in {*ranks, *alphas}}
        other = [name for name, scale in scales.items() if not math.isclose(scale, alpha / rank, rel_tol=1e-6)]
    except (TypeError, AttributeError, ZeroDivisionError, OverflowError):
        raise CheckpointInvalid(f"{CONFIG_FILE}: rank_pattern and alpha_pattern hold no plain numbers.") from None
    if other or (scales and config.get("use_rslora")):
        raise CheckpointInvalid(
            f"{CONFIG_FILE} scales its layers differently (rank_pattern, alpha_pattern); an adapter here has one "
            "alpha / rank for all of them."
        )


def _shown(value: object) -> str:
    return repr(str(value)[:MOST_SHOWN_CHARACTERS])
