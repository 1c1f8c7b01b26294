"""Checks whether GPU ranks can hold a base model, and the model's properties that decide this."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith_trainer.engines.megatron.flags import MegatronSettings, RankRecompute
from tinsmith_trainer.engines.megatron.model.architecture import read_mixture
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

GROUPED_ROW_FLOATS = 8
"""In grouped products on GPUs, a row's length must be a multiple of this number: 16 bytes in bfloat16."""

EXPERTS = "experts"
_ATTENTION = ("linear_q", "linear_k", "linear_v", "linear_proj")
_FEED_FORWARD = ("linear_fc1_gate", "linear_fc1_up", "linear_fc2")
_UNEMBEDDING = ("output_layer",)

NAMES_CODE = "auto_map"
"""The key by which a configuration names a Python module in the directory or in a hub repository."""


@dataclass(frozen=True, slots=True)
class RankedModel:
    """The properties of the model for which ranks are built.

    `max_tokens` is the length of the longest datum, `max_rank` the highest rank of an adapter. `token_budget` limits a
    packed microbatch, but one datum of `max_tokens` always fits. `recompute` is the part of each layer that is
    recomputed in backward. `experts` is the number of experts in each layer, 0 for a dense model.
    """

    directory: Path
    vocab_size: int
    kv_heads: int
    tied_embeddings: bool
    max_rank: int
    max_tokens: int
    token_budget: int
    recompute: RankRecompute = "layers"
    experts: int = 0

    @property
    def lora_targets(self) -> list[str]:
        """The modules that a client may train, in Megatron-Bridge's names.

        The tensors of untrained modules stay zero.
        """
        return [*_ATTENTION, *((EXPERTS,) if self.experts else _FEED_FORWARD), *_UNEMBEDDING]


def ranked_model(directory: Path, info: BaseModelInfo, settings: MegatronSettings) -> RankedModel:
    """Read the model's properties. Raises ModelDirectoryInvalid for an unsupported mixture of experts."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(directory)
    mixture = read_mixture(directory, config)
    return RankedModel(
        directory=directory,
        vocab_size=info.vocab_size,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        tied_embeddings=bool(config.tie_word_embeddings),
        max_rank=settings.max_rank,
        max_tokens=info.max_sequence_length,
        token_budget=settings.token_budget,
        recompute=settings.recompute,
        experts=mixture.experts if mixture else 0,
    )


def check_layout(model: RankedModel, parallelism: Parallelism) -> None:
    """Raise ModelDirectoryInvalid if GPU ranks with this parallelism cannot hold the model."""
    if parallelism.expert > 1 and (not model.experts or model.experts % parallelism.expert):
        raise ModelDirectoryInvalid(
            f"The model in {model.directory} has {model.experts or 'no'} experts, which {parallelism.expert} ranks "
            f"cannot share equally. Choose an expert parallelism that divides them; 1 for a dense model."
        )
    if model.experts and model.max_rank % GROUPED_ROW_FLOATS:
        raise ModelDirectoryInvalid(
            f"Adapters of experts need a highest rank that is a multiple of {GROUPED_ROW_FLOATS}, and max_rank is "
            f"{model.max_rank}. Choose a multiple of {GROUPED_ROW_FLOATS}: smaller ranks are padded to it."
        )
    shared = {
        "key and value heads": model.kv_heads,
        "tokens in its vocabulary": model.vocab_size,  # Megatron-Bridge does not pad it
        "rows of LoRA's A at the highest rank": model.max_rank,
    }
    for what, count in shared.items():
        if count % parallelism.tensor:
            raise ModelDirectoryInvalid(
                f"The model in {model.directory} has {count} {what}, which {parallelism.tensor} tensor ranks cannot "
                f"share equally. Choose a number of tensor ranks that divides {count}."
            )
    if model.tied_embeddings and parallelism.pipeline > 1:
        # The last stage uses `LoRALinear.weight`, which already includes the adapter, as its unembedding, and adds the
        # adapter again to the output (`megatron/bridge/peft/lora_layers.py`).
        raise ModelDirectoryInvalid(
            f"The model in {model.directory} has tied embeddings, which pipeline stages would adapt twice. Use 1 "
            f"pipeline stage: models with tied embeddings are small enough for tensor ranks alone."
        )


def check_no_code(directory: Path, framework: str) -> None:
    """Raise ModelDirectoryInvalid, with the name of the file, for a model that includes code.

    `framework` is the program that would run this code. NeMo RL and Miles load configurations, tokenizers and models
    with `trust_remote_code=True`, and have no setting to change this. NeMo RL sets the option in
    `finalize_megatron_setup` (`nemo_rl/models/megatron/setup.py`) and in `import_model_from_hf_name`
    (`nemo_rl/models/megatron/community_import.py`). Miles sets the option in `init`
    (`miles/backends/megatron_utils/actor.py`) and in `_setup_lora_model_via_bridge` in the same folder.
    """
    modules = sorted(path.name for path in directory.glob("*.py"))
    naming = sorted(path.name for path in directory.glob("*.json") if _names_code(path))
    if found := [*modules, *naming]:
        raise ModelDirectoryInvalid(
            f"The model in {directory} includes a program ({', '.join(found)}), which {framework} would run on every "
            f"rank. Use a model of a family that transformers implements, and remove these files, or their "
            f"{NAMES_CODE}."
        )


def _names_code(file: Path) -> bool:
    """Return whether a JSON file names a Python module to run.

    Only keys of objects count, because a tokenizer's vocabulary may hold any word.
    """
    try:
        content = json.loads(file.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError):
        return False
    return isinstance(content, dict) and NAMES_CODE in content
