"""The benchmarks for a GPU run from end to end, here on the CPU with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SMALL = ["--model", "tiny", "--device", "cpu", "--rows", "2", "--tokens", "32", "--steps", "1"]
SHORT = ["--prompt-tokens", "8", "--sampled-tokens", "4"]


def run(*more: str) -> str:
    program = [sys.executable, str(ROOT / "dev" / "benchmarks" / "gpu_step.py"), *SMALL, *SHORT, *more]
    return subprocess.run(program, check=True, capture_output=True, text=True).stdout


@pytest.mark.timeout(300)
@pytest.mark.slow("runs the benchmark in a process of its own, which imports PyTorch")
def test_the_benchmark_measures_a_step_a_bare_loop_and_samples() -> None:
    report: dict[str, Any] = json.loads(
        run("--json", "--dtype", "float32", "--recompute", "layers", "--loss-kernel", "torch")
    )
    assert report["device"] == "cpu"
    assert report["tera_flops_per_second"] > 0
    for side in (report["bare"], report["engine"]):
        assert side["error"] is None
        assert side["peak_gb"] is None
        assert side["tokens_per_second"] > 0
        assert 0 < side["share_of_products"] < 1
    assert report["sampled_tokens_per_second"] == pytest.approx(4 * report["samples_per_second"])


@pytest.mark.timeout(300)
@pytest.mark.slow("runs the benchmark in a process of its own, which imports PyTorch")
def test_calls_and_decode_are_measured_alone_and_next_to_each_other() -> None:
    program = [sys.executable, str(ROOT / "dev" / "benchmarks" / "gpu_calls.py"), "--model=tiny", "--device=cpu"]
    more = ["--only=8 ragged", "--repeats=1", "--decode", "--kv-cache-bytes=100000000", "--json"]
    report = json.loads(subprocess.run([*program, *more], check=True, capture_output=True, text=True).stdout)
    assert [call["tokens"] for call in report["calls"]] == [1029, 8232]
    assert all(decode["step_seconds"] > 0 for decode in report["decodes"])
    assert report["decodes"][-1]["calls_per_second"] > 0
