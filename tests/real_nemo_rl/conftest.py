"""Tests of NeMo RL itself on a CPU. `make test-nemo-rl` runs them, and docs/how-to/nemo-rl.md says which did."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import backend_runs
import pytest
from support.real_runs import Note, noted

ROOT = Path(__file__).parents[2]
VERSIONS = tomllib.loads((ROOT / "trainer_image" / "versions.toml").read_text())


@pytest.fixture(scope="session", autouse=True)
def _image(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set what NeMo RL's image sets, before Ray is imported, which reads it.

    Models are converted once for all tests.
    """
    from support.nemo_rl.real_workers import environment_of_image
    from tinsmith_trainer.engines.megatron.ray_cluster import prepare_for_ray

    os.environ.update(environment_of_image(tmp_path_factory.mktemp("image")))
    prepare_for_ray()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    return noted(request, backend_runs.NEMO_RL, VERSIONS["nemo-rl"]["commit"])
