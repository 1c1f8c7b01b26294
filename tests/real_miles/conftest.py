"""Tests of Miles itself on a CPU. `make test-miles` runs them, and docs/how-to/miles.md says which did."""

from __future__ import annotations

import tomllib
from pathlib import Path

import backend_runs
import pytest
from support.real_runs import Note, noted

ROOT = Path(__file__).parents[2]
VERSIONS = tomllib.loads((ROOT / "trainer_image" / "versions.toml").read_text())


@pytest.fixture(scope="session", autouse=True)
def _ray() -> None:
    """Set the variables before Ray is imported, which reads them."""
    from tinsmith_trainer.engines.megatron.ray_cluster import prepare_for_ray

    prepare_for_ray()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    return noted(request, backend_runs.MILES, VERSIONS["miles"]["commit"])
