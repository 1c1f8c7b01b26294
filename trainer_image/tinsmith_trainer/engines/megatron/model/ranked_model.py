"""A base model as ranks on GPUs get it: what of it decides whether they can hold it, and what is refused."""

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
"""In bfloat16, 16 bytes: grouped products of GPUs refuse rows that are no multiple of it."""

EXPERTS = "experts"
_ATTENTION = ("linear_q", "linear_k", "linear_v", "linear_proj")
_FEED_FORWARD = ("linear_fc1_gate", "linear_fc1_up", "linear_fc2")
_UNEMBEDDING = ("output_layer",)

NAMES_CODE = "auto_map"
"""The key by which a configuration names a module, in the directory or in a repository of a hub."""


@dataclass(frozen=True, slots=True)
class RankedModel:
    """What ranks are made for.

    `max_tokens` is the longest datum's, `max_rank` the highest rank of an adapter, `token_budget` how many tokens a
    packed microbatch may have, or those of a longest datum if that is more, `recompute` what of each layer is
    computed again in backward. `experts`: of each layer of a mixture; 0 of a dense model.
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
        """All that a client may ask to train, in Megatron-Bridge's names; what it does not is zero, and stays so."""
        return [*_ATTENTION, *((EXPERTS,) if self.experts else _FEED_FORWARD), *_UNEMBEDDING]


def ranked_model(directory: Path, info: BaseModelInfo, settings: MegatronSettings) -> RankedModel:
    """Raises ModelDirectoryInvalid for a mixture of experts that adapters of ours have no names for."""
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
    """Raises ModelDirectoryInvalid where such ranks on GPUs could not hold such a model."""
    if parallelism.expert > 1 and (not model.experts or model.experts % parallelism.expert):
        raise ModelDirectoryInvalid(
            f"The model in {model.directory} has {model.experts or 'no'} experts, which {parallelism.expert} ranks "
            f"cannot share equally. Choose an expert parallelism that divides them; of a dense model that is 1."
        )
    if model.experts and model.max_rank % GROUPED_ROW_FLOATS:
        raise ModelDirectoryInvalid(
            f"Adapters of experts are multiplied by rows of {GROUPED_ROW_FLOATS} numbers, and the highest rank is "
            f"{model.max_rank}. Choose a multiple of {GROUPED_ROW_FLOATS}: smaller ranks are padded to it."
        )
    shared = {
        "key and value heads": model.kv_heads,
        "tokens in its vocabulary": model.vocab_size,  # Megatron-Bridge pads none of a transformers model's
        "rows of LoRA's A at the highest rank": model.max_rank,
    }
    for what, count in shared.items():
        if count % parallelism.tensor:
            raise ModelDirectoryInvalid(
                f"The model in {model.directory} has {count} {what}, which {parallelism.tensor} tensor ranks cannot "
                f"share equally. Choose a number of tensor ranks that divides {count}."
            )
    if model.tied_embeddings and parallelism.pipeline > 1:
        # The last stage takes its unembedding from `LoRALinear.weight`, which has the adapter in it already, and
        # adds the adapter to what comes out (`megatron/bridge/peft/lora_layers.py`).
        raise ModelDirectoryInvalid(
            f"The model in {model.directory} unembeds by its embeddings, which pipeline stages would adapt twice. "
            f"Use 1 pipeline stage: models that share these weights are small enough for tensor ranks alone."
        )


def check_no_code(directory: Path, who: str) -> None:
    """Raises ModelDirectoryInvalid, naming the file, for a model that brings a program along.

    `who` would run it. NeMo RL loads configurations, tokenizers and models with `trust_remote_code=True`
    (`finalize_megatron_setup` in `nemo_rl/models/megatron/setup.py`, `import_model_from_hf_name` in
    `nemo_rl/models/megatron/community_import.py`), and so does Miles (`init` in
    `miles/backends/megatron_utils/actor.py`, `_setup_lora_model_via_bridge` beside it); neither offers another way.
    Without programs there is nothing to trust.
    """
    modules = sorted(path.name for path in directory.glob("*.py"))
    naming = sorted(path.name for path in directory.glob("*.json") if _names_code(path))
    if found := [*modules, *naming]:
        raise ModelDirectoryInvalid(
            f"The model in {directory} brings a program along ({', '.join(found)}), which {who} would run on every "
            f"rank. Use a model of a family that transformers has itself, and take these files, or their "
            f"{NAMES_CODE}, away."
        )


def _names_code(file: Path) -> bool:
    """Only objects count: a tokenizer's vocabulary may hold any word."""
    try:
        content = json.loads(file.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError):
        return False
    return isinstance(content, dict) and NAMES_CODE in content
