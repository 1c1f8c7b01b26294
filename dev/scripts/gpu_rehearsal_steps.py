"""The steps of `make gpu-rehearsal`. The steps run in the environment with the packages of the image.

The steps install wheels and look for packages in the same way as gpu_run.py on a machine with a GPU. This module
imports only the standard library, because the rehearsal checks whether other packages are available.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gpu_run
import run_results
from commits import CannotRun

STEP_SECONDS = 600.0
"""The time limit of a step. A borrowed machine ends a command after ten minutes, too."""
PYTEST = (*gpu_run.PYTEST, "-p", "no:cacheprovider", "-q")
SPREAD = ("--numprocesses", "2", "--maxschedchunk", "1")
CONTRACT = "tests/contract/engine"
SAMPLER = tuple(name for name in gpu_run.TESTS if name.startswith("tests/contract/sampler/"))
ONE_RANK = "nemo-rl-in-process"
SDK = "tests/gpu/test_sdk.py"
PARITY = ("-m", "tinsmith_trainer.parity.command", "--engine", "peft:device=cpu,dtype=float32", "--engine")
LIKE_GPU = "support.engine.like_gpu:build_for_worker:device=cpu,dtype="
PLAIN_PEFT = ("--engine", "peft-reference:device=cpu,dtype=bfloat16")
TINY = ("--model", "tiny", "--device", "cpu", "--json")
BENCHMARK = ("dev/benchmarks/gpu_step.py", *TINY, "--dtype")
CALLS = ("dev/benchmarks/gpu_calls.py", *TINY, "--decode", "--repeats", "1", "--only", "8 ragged")


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the rehearsal.

    `arguments` are the arguments for the Python interpreter. `count` reads a number from standard output. If the number
    is below `least`, the step has failed.
    """

    title: str
    arguments: Sequence[str]
    count: Callable[[str], int]
    least: int
    unit: str


def collected(output: str) -> int:
    """Count the tests that pytest collected."""
    return _number(r"(\d+)(?:/\d+)? tests? collected", output)


def passed(output: str) -> int:
    """Count the tests that passed."""
    return _number(r"(\d+) passed", output)


def agreeing(output: str) -> int:
    """Count the engines with the same results as the first engine."""
    return len(re.findall(r"^Within \S+ in every step", output, re.MULTILINE))


def tokens_per_second(output: str) -> int:
    """Return the rate of the engine in the report of `make gpu-run`. If the report has no figures, return 0."""
    try:
        entries = gpu_run.benchmark_entries([], [json.loads(output)], {})
    except json.JSONDecodeError:
        return 0
    return int(entries[0]["engine"]) if entries else 0


def calls_and_decodes(output: str) -> int:
    """Count the calls and the decode steps with a time in the report of `make gpu-run`."""
    try:
        return len(gpu_run.calls_entries([], [json.loads(output)], {}))
    except json.JSONDecodeError:
        return 0


def _number(pattern: str, output: str) -> int:
    found = re.search(pattern, output)
    return int(found[1]) if found else 0


STEPS = (
    Step("collection of GPU tests", (*PYTEST, "--collect-only", "-m", "gpu", *gpu_run.TESTS), collected, 1, "tests"),
    Step("contract on the GPU's path", (*PYTEST, *SPREAD, CONTRACT, "-k", "like-gpu"), passed, 110, "passed"),
    Step("sampler on the GPU's path", (*PYTEST, *SPREAD, *SAMPLER, "-k", "like-gpu"), passed, 100, "passed"),
    Step("contract of one Megatron rank", (*PYTEST, *SPREAD, CONTRACT, "-k", ONE_RANK), passed, 50, "passed"),
    Step("SDK and server", (*PYTEST, *SPREAD, "-m", "gpu", SDK, "--place", "cpu"), passed, 3, "passed"),
    Step("parity in float32", (*PARITY, f"{LIKE_GPU}float32"), agreeing, 1, "engine agrees"),
    Step(
        "parity in bfloat16",
        (*PARITY, f"{LIKE_GPU}bfloat16", *PLAIN_PEFT, "--atol", "0.02"),
        agreeing,
        2,
        "engines agree",
    ),
    *(
        Step(f"benchmark in {dtype}", (*BENCHMARK, dtype), tokens_per_second, 1, "tokens per second")
        for dtype in ("float32", "bfloat16")
    ),
    Step("calls and decode", CALLS, calls_and_decodes, 7, "measured"),
)


def line(title: str, seconds: float, result: str) -> str:
    return f"{title:30}{seconds:6.0f} s  {result}"


def run_step(step: Step, packages: Sequence[str]) -> bool:
    """Run a step and print the line of the step.

    If the step fails, print the output of the step. Return whether the step passed.
    """
    started = time.monotonic()
    status, output, errors = _run(step, packages)
    counted = step.count(output) if status == 0 else 0
    good = status == 0 and counted >= step.least
    result = f"{counted} {step.unit}" if good else failure(step, status, counted)
    print(line(step.title, time.monotonic() - started, result), flush=True)
    if not good:
        print(f"{output}{errors}", flush=True)
    return good


def failure(step: Step, status: int | None, counted: int) -> str:
    """Return the reason why a step failed, according to the exit status.

    A status of None means that the step took too long.
    """
    if status is None:
        return f"failed: no end within {STEP_SECONDS:g} s"
    if status != 0:
        return f"failed with status {status}"
    return f"failed: {counted} {step.unit}, and at least {step.least} are expected"


def _run(step: Step, packages: Sequence[str]) -> tuple[int | None, str, str]:
    with tempfile.TemporaryDirectory() as scratch:
        path = gpu_run.environment_of_children([str(gpu_run.ROOT / "tests"), *packages])
        variables = {**os.environ, **path, run_results.FILE: f"{scratch}/results"}
        try:
            ended = subprocess.run(
                [sys.executable, *step.arguments],
                cwd=gpu_run.ROOT,
                env=variables,
                capture_output=True,
                text=True,
                timeout=STEP_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return None, _text(error.stdout), _text(error.stderr)
    return ended.returncode, ended.stdout, ended.stderr


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every step, even after a failure. Return 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, required=True, help="a folder of wheels, as `make gpu-wheels` makes it")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        with gpu_run.packages_of(options.wheels) as packages:
            gpu_run.require_packages()
            print(line("installation of wheels", time.monotonic() - started, "all packages found"), flush=True)
            outcomes = [run_step(step, packages) for step in STEPS]
            return 0 if all(outcomes) else 1
    except CannotRun as error:
        print(f"gpu-rehearsal: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
