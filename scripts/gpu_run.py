"""Runs all that one machine's GPUs can run of the tests and the benchmark, and writes it down: `make gpu-run`.

Nothing of the project need be installed, only what its worker imports. It ends in time: what has not run by then keeps
the row of its last run. Exits with 1 if a test failed, and with 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_reference
import outcomes
from commits import CannotRun, commit_of
from outcomes import Result

ROOT = Path(__file__).parents[1]
SOURCES = ("api_server", "client", "operator", "rpc", "trainer_image", "scripts")
TESTS = ("tests/gpu/test_peft_engine.py", "tests/contract/engine", "tests/gpu")
"""In the order of what one would know first. Pytest runs a test once, whoever names it."""
NEEDED = (
    *("torch", "transformers", "peft", "grpc", "structlog", "typer", "zstandard", "safetensors", "prometheus_client"),
    *("pytest", "pytest_asyncio", "pytest_timeout", "hypothesis"),
)
BENCHMARK_SECONDS = 150
"""What is kept of the time for the benchmark."""
END_SECONDS = 20
WRITTEN = ("docs/gpu-runs.toml", "docs/gpu.md")
FAILED, NOTHING_RUN = 1, 2


def device_name() -> str:
    """Raises CannotRun, in one sentence, where packages or GPUs are missing."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise CannotRun(f"{sys.executable} has no {', '.join(missing)}: install them there, or name another by PYTHON=")
    import torch  # takes seconds, and may be what is missing

    if not torch.cuda.is_available():
        raise CannotRun(f"PyTorch {torch.__version__} of {sys.executable} sees no GPU: nvidia-smi says what there is")
    count = torch.cuda.device_count()
    return torch.cuda.get_device_name() if count == 1 else f"{count} x {torch.cuda.get_device_name()}"


def run_tests(tests: Sequence[str], marker: str, seconds: float) -> list[Result]:
    """What ran of them within the time, in order."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "results"
        path = os.pathsep.join(str(ROOT / source) for source in SOURCES)
        program = [sys.executable, "-m", "pytest", "-p", "outcomes", "-m", marker, *tests]
        _run_for(seconds, program, {"PYTHONPATH": path, outcomes.FILE: str(file)})
        return outcomes.read_results(file)


def _run_for(seconds: float, program: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the program to its end or to the end of the time, and return its exit status.

    The end of the time is a Ctrl-C first, so that servers that the program started end, too.
    """
    # A shell starts what runs in the background with SIGINT ignored, which a child inherits.
    command = ["env", "--default-signal=INT", *program]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, start_new_session=True)
    for ending, patience_seconds in ((signal.SIGINT, seconds), (signal.SIGKILL, END_SECONDS)):
        try:
            return process.wait(max(patience_seconds, 0.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, ending)
    return process.wait()


def run_benchmark(model: str, seconds: float) -> dict[str, Any] | None:
    """The report of benchmarks/gpu_step.py; None, and why on standard error, where it fails or takes too long."""
    program = [sys.executable, "benchmarks/gpu_step.py", "--model", model, "--json"]
    path = os.pathsep.join(str(ROOT / source) for source in SOURCES)
    try:
        told = subprocess.run(
            program,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            check=True,
            timeout=seconds,
            stdout=subprocess.PIPE,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"the benchmark of {model} was not measured: {error}", file=sys.stderr)
        return None
    report: dict[str, Any] = json.loads(told.stdout)
    return report


def test_entries(
    known: Sequence[Mapping[str, Any]], results: Sequence[Result], run: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The entries, with this run where a test passed or failed. One that was skipped keeps its last run."""
    counted = outcomes.by_row([entry["name"] for entry in known], results)
    return [{**entry, **_run_of(counted.get(entry["name"]), run)} for entry in known]


def _run_of(result: Result | None, run: Mapping[str, str]) -> dict[str, Any]:
    if result is None or result.outcome == "skipped":
        return {}
    return {"run": {**run, "failed": result.reason} if result.outcome == "failed" else dict(run)}


def benchmark_entries(
    known: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]], run: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The entries, those of the reports' models anew. A side without figures makes no entry."""
    measured = [benchmark_entry(report, run) for report in reports if not _error_of(report)]
    models = {entry["model"] for entry in measured}
    return sorted(
        [*(dict(entry) for entry in known if entry["model"] not in models), *measured], key=lambda e: e["model"]
    )


def _error_of(report: Mapping[str, Any]) -> str | None:
    error: str | None = report["bare"]["error"] or report["engine"]["error"]
    return error


def benchmark_entry(report: Mapping[str, Any], run: Mapping[str, str]) -> dict[str, Any]:
    """`engine`, `samples`: tokens per second. `ratio`: the engine's as a multiple of the bare loop's."""
    engine, bare = report["engine"], report["bare"]
    return {
        "model": report["model"],
        "dtype": report["dtype"],
        "shape": f"{report['rows']} x {report['tokens']} tokens",
        "engine": round(engine["tokens_per_second"], 1),
        "ratio": round(engine["tokens_per_second"] / bare["tokens_per_second"], 3),
        "peak_gb": round(engine["peak_gb"] or 0.0, 1),
        "samples": round(report["sampled_tokens_per_second"], 1),
        "run": dict(run),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the whole run; 600 unless told")
    parser.add_argument("--model", default="0.6B", help="of the benchmark")
    parser.add_argument("--commit", default="", help="where the tree is no checkout")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    started = time.monotonic()
    try:
        run = {
            "device": device_name(),
            "commit": given.commit or commit_of(ROOT, *WRITTEN),
            "date": str(datetime.date.today()),
        }
    except CannotRun as error:
        print(f"gpu-run: {error}", file=sys.stderr)
        return NOTHING_RUN
    results = run_tests(TESTS, "gpu", given.seconds - BENCHMARK_SECONDS - END_SECONDS)
    report = run_benchmark(given.model, max(given.seconds - (time.monotonic() - started), END_SECONDS))
    gpu_reference.write(
        test_entries(gpu_reference.entries(), results, run),
        benchmark_entries(gpu_reference.entries("benchmark"), [report] if report else [], run),
    )
    counts = Counter(result.outcome for result in results)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "no test ran"
    print(f"{run['device']}: {told} in {time.monotonic() - started:.0f} s, written to docs/gpu-runs.toml")
    return FAILED if counts["failed"] or not results or report is None else 0


if __name__ == "__main__":
    sys.exit(main())
