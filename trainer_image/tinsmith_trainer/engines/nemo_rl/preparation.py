"""What has to be there before ranks are made: a model that they can hold, converted, and the Python that runs them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith_trainer.engines.base import BaseModelInfo
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.model.architecture import read_mixture
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.nemo_rl.conversion import converted_model
from tinsmith_trainer.engines.nemo_rl.policy_config import Config, NemoModel, policy_config, starting_from
from tinsmith_trainer.errors import ModelDirectoryInvalid, TrainerError

STOCK_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
WORKER = "tinsmith_trainer.engines.nemo_rl.actor.TinsmithMegatronWorker"
START, CALL, CALL_SHARDED = "ts_start", "ts_call", "ts_call_sharded"
"""Its methods. Named here, because the driver's Python has no Megatron, which the class needs."""

VENVS_VARIABLE = "NEMO_RL_VENV_DIR"
DEFAULT_VENVS = Path("/opt/ray_venvs")

NAMES_CODE = "auto_map"
"""The key by which a configuration names a module, in the directory or in a repository of a hub."""


class RankPythonMissing(TrainerError):
    """The image has no prebuilt environment for Megatron workers."""


def rank_python(environment: Mapping[str, str] = os.environ) -> Path:
    """The interpreter that NeMo RL's image prepared for its own Megatron workers; ours are the same but for a mixin.

    By path, because NeMo RL builds a new environment, for minutes and from the network, for a class whose entry begins
    with `uv` (`_create_workers_from_bundle_indices` in `nemo_rl/distributed/worker_groups.py`).
    Raises RankPythonMissing.
    """
    python = Path(environment.get(VENVS_VARIABLE, DEFAULT_VENVS)) / STOCK_WORKER / "bin" / "python"
    if not python.exists():
        raise RankPythonMissing(
            f"{python} does not exist: this is no image of NeMo RL with its Megatron workers' environment built in. "
            f"Build one as docs/nemo-rl.md says, or set {VENVS_VARIABLE} to where the environments are."
        )
    return python


def register(registry: MutableMapping[str, str], python: Path) -> None:
    """Before `Policy` is made: a class that is not in `ACTOR_ENVIRONMENT_REGISTRY` raises ValueError there."""
    registry[WORKER] = str(python)


@dataclass(frozen=True, slots=True)
class Prepared:
    """`config` is NeMo RL's for the ranks, `python` theirs."""

    config: Config
    python: Path


def prepare(
    directory: Path,
    info: BaseModelInfo,
    parallelism: Parallelism,
    settings: MegatronSettings,
    environment: Mapping[str, str] = os.environ,
) -> Prepared:
    """Refuses first, then converts. Raises ModelDirectoryInvalid, RankPythonMissing and ServerError."""
    check_no_code(directory)
    python = rank_python(environment)
    config = policy_config(nemo_model(directory, info, settings), parallelism)
    return Prepared(starting_from(config, converted_model(directory, info.revision, python, environment)), python)


def nemo_model(directory: Path, info: BaseModelInfo, settings: MegatronSettings) -> NemoModel:
    """Raises ModelDirectoryInvalid for a mixture of experts that adapters of ours have no names for."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(directory)
    mixture = read_mixture(directory, config)
    return NemoModel(
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


def check_no_code(directory: Path) -> None:
    """Raises ModelDirectoryInvalid, naming the file, for a model that brings a program along.

    NeMo RL loads configurations, tokenizers and models with `trust_remote_code=True` and offers no other way
    (`finalize_megatron_setup` in `nemo_rl/models/megatron/setup.py`, `import_model_from_hf_name` in
    `nemo_rl/models/megatron/community_import.py`). Without programs there is nothing to trust.
    """
    modules = sorted(path.name for path in directory.glob("*.py"))
    naming = sorted(path.name for path in directory.glob("*.json") if _names_code(path))
    if found := [*modules, *naming]:
        raise ModelDirectoryInvalid(
            f"The model in {directory} brings a program along ({', '.join(found)}), which NeMo RL would run on every "
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
