"""Tests of NeMo RL itself on a CPU. `make test-nemo-rl` runs them, and docs/nemo-rl.md says which did."""

from __future__ import annotations

import datetime
import os
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import nemo_rl_reference
import pytest

ROOT = Path(__file__).parents[2]
VERSIONS = tomllib.loads((ROOT / "trainer_image" / "versions.toml").read_text())

Note = Callable[[str, str, str], None]


@pytest.fixture(scope="session", autouse=True)
def _image(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What NeMo RL's image sets, and models converted once for all tests. Before Ray is imported, which reads it."""
    from support.nemo_rl.real_workers import environment_of_image
    from tinsmith_trainer.engines.megatron.ranks.ray_cluster import prepare_for_ray

    os.environ.update(environment_of_image(tmp_path_factory.mktemp("image")))
    prepare_for_ray()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Writes down that this test ran: what, how far off it may be, and was. Called at its end."""

    def write(what: str, tolerance: str, deviation: str) -> None:
        run = {
            "test": request.node.nodeid,
            "what": what,
            "tolerance": tolerance,
            "deviation": deviation,
            "commit": _commit(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        nemo_rl_reference.note(run, VERSIONS["nemo-rl"]["commit"])

    return write


def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return asked.stdout.strip()
