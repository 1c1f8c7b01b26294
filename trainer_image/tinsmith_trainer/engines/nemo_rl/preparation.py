"""What has to be there before ranks are made: a model that they can hold, converted, and the Python that runs them."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.model.ranked_model import check_no_code, ranked_model
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.nemo_rl.conversion import converted_model
from tinsmith_trainer.engines.nemo_rl.policy_config import Config, policy_config, starting_from
from tinsmith_trainer.errors import TrainerError
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

STOCK_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
WORKER = "tinsmith_trainer.engines.nemo_rl.actor.TinsmithMegatronWorker"
START, CALL, CALL_SHARDED = "ts_start", "ts_call", "ts_call_sharded"
"""Its methods. Named here, because the driver's Python has no Megatron, which the class needs."""

VENVS_VARIABLE = "NEMO_RL_VENV_DIR"
DEFAULT_VENVS = Path("/opt/ray_venvs")


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
            f"Build one as docs/how-to/nemo-rl.md says, or set {VENVS_VARIABLE} to where the environments are."
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
    check_no_code(directory, "NeMo RL")
    python = rank_python(environment)
    config = policy_config(ranked_model(directory, info, settings), parallelism)
    return Prepared(starting_from(config, converted_model(directory, info.revision, python, environment)), python)
