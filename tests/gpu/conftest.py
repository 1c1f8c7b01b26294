"""Tests of real GPUs. `make test-gpu` runs them; gpu.md says which of them ran, on what.

`make test-vllm` runs those that a CPU can run as well, and `make gpu-rehearsal` those with `--place cpu`.
"""

from __future__ import annotations

import pytest
from support.engine.contract import require_gpus

PLACE = "--place"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(PLACE, choices=("gpu", "cpu"), default="gpu", help="where the worker of tests of the SDK computes")


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest) -> str:
    """Return the place of the worker. Skips the test where the place is a GPU and there is none."""
    # The option is unknown where pytest starts above this folder.
    place: str = request.config.getoption(PLACE, "gpu")
    if place == "gpu":
        require_gpus()
    return place


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> None:
    if "place" not in request.fixturenames and not request.node.get_closest_marker("vllm"):
        require_gpus()
