"""The check of an imported adapter's configuration, field by field of PEFT's LoraConfig.

Every field is either supported, or known to have no effect on the result, or refused by name. Unknown fields are
refused, too, because with these fields, a later PEFT may compute other results.
"""

from __future__ import annotations

import json
import math
from typing import Any

from tinsmith_trainer.engines.peft_layout import CONFIG_FILE
from tinsmith_trainer.errors import CheckpointInvalid

MOST_ALPHA = 1e6
"""The largest accepted value of alpha: float32 holds this value without loss, and training uses far smaller values."""
MOST_SHOWN_CHARACTERS = 100

HONOURED = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}
)
HARMLESS = frozenset(
    {
        # Names and versions: the weights are checked against the base model itself.
        *("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type"),
        # The places of PEFT's layers. The names of the weights contain the same information.
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
"""Fields for parts of an adapter other than A and B.

Tinsmith's adapters do not have these parts. A false value turns a field off.
"""
PLAIN_INITIALIZATIONS = ("gaussian", "eva", "orthogonal", "mica")
"""Initializations that leave the base weights unchanged, in addition to true, false and null."""
CONVERTED_INITIALIZATIONS = ("pissa", "olora", "corda", "lora_ga")
"""Initializations that subtract the first A and B from the base weights.

PEFT can convert adapters with these initializations.
"""


def read_rank_and_alpha(content: bytes) -> tuple[int, float]:
    """Return the rank and alpha. The adapter's scale is alpha / rank. Raises CheckpointInvalid."""
    not_lora = (
        f"{CONFIG_FILE} is not PEFT's configuration for LoRA: it needs positive `r` and `lora_alpha`, "
        f"and an alpha of at most {MOST_ALPHA:g}."
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
        raise CheckpointInvalid(f"{CONFIG_FILE} is for {_shown(config['peft_type'])}; this server supports only LoRA.")
    found = {field: what for field, what in REFUSED.items() if config.get(field)}
    if config.get("bias", "none") != "none":
        found["bias"] = "biases"
    if found:
        parts = " and ".join(dict.fromkeys(found.values()))
        raise CheckpointInvalid(
            f"{CONFIG_FILE}: the adapter has {parts} ({', '.join(found)}); this server supports only LoRA. Merge it "
            "into the base model and serve that, or train the adapter as plain LoRA."
        )
    # PEFT does not use a field that is null.
    unknown = [field for field in config.keys() - HONOURED - HARMLESS - REFUSED.keys() if config[field] is not None]
    if unknown:
        raise CheckpointInvalid(
            f"{CONFIG_FILE}: the field {_shown(min(unknown))} is unknown to this server, which cannot check whether "
            "the adapter is plain LoRA. Remove the field if it does not change what the adapter computes."
        )


def _check_initialization(value: Any) -> None:
    """Refuse adapters with an initialization that changed the base weights: Tinsmith's base weights are unchanged."""
    if value is None or isinstance(value, bool):
        return
    name = value.lower() if isinstance(value, str) else ""
    if name in PLAIN_INITIALIZATIONS:
        return
    if name.startswith(CONVERTED_INITIALIZATIONS):
        cure = (
            "Save the adapter with PEFT's `path_initial_model_for_weight_conversion`, which converts it to plain LoRA."
        )
    else:
        cure = "Merge the adapter into its base model and serve that, or train it with another initialization."
    raise CheckpointInvalid(
        f"{CONFIG_FILE}: init_lora_weights is {_shown(value)}, which may change the base weights; this server has the "
        f"unchanged ones. {cure}"
    )


def _check_patterns(config: dict[str, Any], rank: int, alpha: float) -> None:
    """Allow different ranks per layer, which fused experts have, but only one scale for the whole adapter."""
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    try:
        scales = {name: alphas.get(name, alpha) / ranks.get(name, rank) for name in {*ranks, *alphas}}
        other = [name for name, scale in scales.items() if not math.isclose(scale, alpha / rank, rel_tol=1e-6)]
    except (TypeError, AttributeError, ZeroDivisionError, OverflowError):
        raise CheckpointInvalid(f"{CONFIG_FILE}: rank_pattern and alpha_pattern must hold positive numbers.") from None
    if other or (scales and config.get("use_rslora")):
        raise CheckpointInvalid(
            f"{CONFIG_FILE} scales its layers differently (rank_pattern, alpha_pattern); this server needs one "
            "alpha / rank for all layers."
        )


def _shown(value: object) -> str:
    return repr(str(value)[:MOST_SHOWN_CHARACTERS])
