"""Ranks on GPUs with Miles: what each is given of the environment, and what is refused before Ray is asked."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.megatron.factory import RanksRequest
from tinsmith_trainer.engines.megatron.flags import MegatronSettings, RankPlacement
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.miles.group import (
    DETERMINISTIC_VARIABLES,
    MILES_VARIABLES,
    rank_environment,
    start_miles_ranks,
)
from tinsmith_trainer.errors import ModelDirectoryInvalid

WHAT_A_DRIVER_IMPORTS = """
import tinsmith_trainer.engines.miles.group, tinsmith_trainer.engines.megatron.engine
"""
FORBIDDEN = """
import sys
for name in ("megatron", "miles"):
    sys.modules[name] = None
"""


def test_a_rank_gets_the_library_variables_of_the_node_and_no_secrets() -> None:
    node = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_ALGO": "Tree",
        "CUDA_VISIBLE_DEVICES": "1",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HF_TOKEN": "secret",
        "TINSMITH_API_KEY": "secret",
        "PATH": "/usr/bin",
    }
    exact, fast = rank_environment(node, "exact"), rank_environment(node, "fast")
    passed_on = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_ALGO"}
    assert fast.keys() == passed_on | MILES_VARIABLES.keys()
    assert exact == fast | DETERMINISTIC_VARIABLES
    assert (fast["NCCL_ALGO"], exact["NCCL_ALGO"]) == ("Tree", "Ring")


@pytest.mark.timeout(120)
@pytest.mark.slow("imports an engine in a process of its own")
def test_the_driver_imports_neither_megatron_nor_miles() -> None:
    imported = subprocess.run(
        [sys.executable, "-c", FORBIDDEN + WHAT_A_DRIVER_IMPORTS], capture_output=True, text=True, check=False
    )
    assert imported.returncode == 0, imported.stderr


def test_a_model_with_a_program_and_a_layout_that_holds_no_model_are_refused_before_ray_is_asked(
    tmp_path: Path,
) -> None:
    model = tiny_model()
    wanted = RankPlacement(Parallelism(8, tensor=8), in_process=False, nodes=1, gpus_per_node=8, ray_address=None)
    with pytest.raises(ModelDirectoryInvalid, match="tensor ranks cannot share"):
        start_miles_ranks(RanksRequest(model.directory, model.info, wanted, MegatronSettings(max_rank=8)))
    own = tmp_path / "own"
    shutil.copytree(model.directory, own)
    (own / "modeling_own.py").touch()
    with pytest.raises(ModelDirectoryInvalid, match="which Miles would run on every rank"):
        start_miles_ranks(RanksRequest(own, model.info, wanted, MegatronSettings(max_rank=8)))
