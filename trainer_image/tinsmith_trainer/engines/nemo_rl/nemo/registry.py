"""Where NeMo RL finds our worker class, and which Python runs it."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from tinsmith_trainer.errors import TrainerError

STOCK_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
WORKER = "tinsmith_trainer.engines.nemo_rl.nemo.actor.TinsmithMegatronWorker"
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
            f"Build one as docs/nemo-rl.md says, or set {VENVS_VARIABLE} to where the environments are."
        )
    return python


def register(registry: MutableMapping[str, str], python: Path) -> None:
    """Before `Policy` is made: a class that is not in `ACTOR_ENVIRONMENT_REGISTRY` raises ValueError there."""
    registry[WORKER] = str(python)
