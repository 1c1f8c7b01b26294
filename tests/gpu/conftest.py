"""Tests of real GPUs. `make test-gpu` runs them; gpu.md says which of them ran, on what.

`make test-vllm` runs those that a CPU can run as well.
"""

from __future__ import annotations

import pytest
from support.engine.contract import require_gpus


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("vllm"):
        require_gpus()
