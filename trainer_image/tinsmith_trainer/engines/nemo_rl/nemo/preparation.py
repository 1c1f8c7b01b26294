"""What has to be there before ranks are made: a model that they can hold, converted, and the Python that runs them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith_trainer.engines.base import BaseModelInfo
from tinsmith_trainer.engines.nemo_rl.nemo.conversion import converted_model
from tinsmith_trainer.engines.nemo_rl.nemo.foreign_code import check_no_code
from tinsmith_trainer.engines.nemo_rl.nemo.policy_config import Config, NemoModel, policy_config, starting_from
from tinsmith_trainer.engines.nemo_rl.nemo.registry import rank_python
from tinsmith_trainer.engines.nemo_rl.parallelism import Parallelism
from tinsmith_trainer.engines.nemo_rl.settings import NemoRlSettings


@dataclass(frozen=True, slots=True)
class Prepared:
    """`config` is NeMo RL's for the ranks, `python` theirs."""

    config: Config
    python: Path


def prepare(
    directory: Path,
    info: BaseModelInfo,
    parallelism: Parallelism,
    settings: NemoRlSettings,
    environment: Mapping[str, str] = os.environ,
) -> Prepared:
    """Refuses first, then converts. Raises ModelDirectoryInvalid, RankPythonMissing and ServerError."""
    check_no_code(directory)
    python = rank_python(environment)
    config = policy_config(nemo_model(directory, info, settings), parallelism)
    return Prepared(starting_from(config, converted_model(directory, info.revision, python, environment)), python)


def nemo_model(directory: Path, info: BaseModelInfo, settings: NemoRlSettings) -> NemoModel:
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(directory)
    return NemoModel(
        directory=directory,
        vocab_size=info.vocab_size,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        tied_embeddings=bool(config.tie_word_embeddings),
        max_rank=settings.max_rank,
        max_tokens=info.max_sequence_length,
        token_budget=settings.token_budget,
    )
