"""Tests of real GPUs. `make test-gpu` runs them; docs/gpu.md says which of them ran, on what."""

from __future__ import annotations

import pytest
from support.engine.contract import require_gpus


@pytest.fixture(autouse=True)
def _gpu() -> None:
    require_gpus()
