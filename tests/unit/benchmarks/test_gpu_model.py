"""The cost model prices the engine's own operations, and holds what a step on a GPU may cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def estimated(*options: str) -> dict[str, dict[str, Any]]:
    program = [sys.executable, str(ROOT / "dev" / "benchmarks" / "gpu_model.py"), "--json", *options]
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    return {each["name"]: each for each in json.loads(printed)}


@pytest.fixture(scope="module")
def estimates() -> dict[str, dict[str, Any]]:
    return estimated("--only=8 x 512")


@pytest.mark.timeout(300)
@pytest.mark.slow("runs the benchmark in a process of its own, 20 seconds")
def test_a_step_launches_no_more_kernels_and_moves_no_more_float32_than_it_did(
    estimates: dict[str, dict[str, Any]],
) -> None:
    """The limits fall with each improvement of the engine. None may rise."""
    step, optimizer = estimates["8 x 512"], estimates["AdamW and norm of one adapter"]
    assert step["launches"] <= 5053
    assert step["float32_bytes"] <= 1.51e9
    assert optimizer["launches"] <= 14
    assert step["forwards"] == 1


@pytest.mark.slow("shares the run above")
def test_the_floor_is_the_time_of_the_matrix_products_and_no_step_is_below_it(
    estimates: dict[str, dict[str, Any]],
) -> None:
    step = estimates["8 x 512"]
    # Four operations for each of 7.57 billion frozen weights, six for each of 92.3 million of the adapter.
    assert step["floor_seconds"] == pytest.approx(4096 * (4 * 7.568e9 + 6 * 92.3e6) / 790e12, rel=1e-3)
    assert all(each["gpu_seconds"] > each["floor_seconds"] for each in estimates.values())
    assert step["gpu_seconds"] == pytest.approx(sum(step["seconds_by_item"].values()))


@pytest.mark.timeout(300)
@pytest.mark.slow("runs the benchmark in a process of its own, 15 seconds")
def test_calls_of_64_adapters_cost_little_more_than_one_call_of_the_same_tokens() -> None:
    found = estimated("--model=0.6B", "--workloads=adapters", "--only=64 ")
    one, many = found["64 x 64"], found["64 adapters, each 64"]
    assert (one["tokens"], many["tokens"]) == (4096, 4096)
    assert (one["forwards"], many["forwards"]) == (1, 1)
    assert one["gpu_seconds"] <= 39.3e-3
    assert many["gpu_seconds"] <= 57.4e-3
    assert many["host_seconds"] <= 1.26 * one["host_seconds"]
