"""Run the tests and the benchmark that the GPUs of this machine can run, and record the results: `make gpu-run`.

Only the packages that worker, server and SDK import must be installed, not the project itself. On a machine without a
network, missing packages come from a folder of wheels. Each result is written when the test ends, so a killed run keeps
the results of all ended tests. The run has a time limit. A test that has not run before the time limit keeps the row of
an earlier run. The exit status is 1 if a test failed, and 2 if the program could not run or could not write its
results.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_reference
import run_results
from commits import CannotRun, commit_of
from run_results import Result

ROOT = Path(__file__).parents[2]
SOURCES = ("api_server", "client", "operator", "rpc", "trainer_image", "dev/scripts")
TESTS = (
    *(
        "tests/gpu/test_peft_engine.py",
        "tests/gpu/test_fast_paths.py",
        "tests/gpu/test_sdk.py",
        "tests/contract/engine/test_places.py",
        "tests/contract/engine/test_long_datums.py",
    ),
    *(f"tests/contract/sampler/test_{name}.py" for name in ("bfloat16", "parity", "vision")),
    "tests/contract/engine",
    # Listed by module, because other modules in the folder need packages that a GPU image may lack.
    *(f"tests/contract/sampler/test_{name}.py" for name in ("promises", "determinism", "fair_shares", "constraints")),
    "tests/gpu",
)
"""The tests of a run. The most informative tests come first.

Pytest keeps the order of the names, and runs a test only once even if several names match the test.
"""
NEEDED = (
    *("torch", "transformers", "tokenizers", "peft", "safetensors", "numpy", "PIL", "grpc", "grpc_health"),
    *("google.protobuf", "orjson", "pyrage", "apsw", "structlog", "typer", "rich", "zstandard", "prometheus_client"),
    *("typing_extensions", "fsspec", "aiohttp", "llguidance"),
    *("tinker", "pyqwest", "httpx", "h2", "hpack", "hyperframe", "distro", "sniffio", "anyio"),
    *("fastapi", "starlette", "uvicorn", "httptools", "fastapi_swagger", "opentelemetry", "jwt", "yaml"),
    *("pydantic", "pydantic_settings", "dotenv", "sqlalchemy", "greenlet", "alembic", "mako"),
    *("pytest", "pytest_asyncio", "pytest_timeout", "xdist", "hypothesis"),
)
"""The modules that the tests and the benchmark import.

`make gpu-wheels` downloads the modules that are missing in a PyTorch image.
"""
PLUGINS = ("outcomes", "xdist.plugin", "pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""The plugins of pytest. Others of an image stay out: their warnings are errors in these tests."""
PYTEST = ("-m", "pytest", *(argument for plugin in PLUGINS for argument in ("-p", plugin)))
TOLD = ("torch", "transformers", "peft")
"""The packages with versions that a run prints."""
RUN_SECONDS = 480.0
"""The time limit of a run.

Some machines end a command after ten minutes, including one or two minutes for the start.
"""
BENCHMARK_SECONDS = {"tiny": 90, "0.6B": 150, "8B": 210}
"""The part of the time that is reserved for the benchmarks of each model."""
END_SECONDS = 20
MOST_PROCESSES = 8
"""Each process takes half a gigabyte of the GPU's memory for its context."""
NOTE_SECONDS = 5.0
"""The time between two writes of the results."""
WRITTEN = ("docs/gpu-runs.toml", "docs/how-to/gpu.md")
FAILED, NOTHING_RUN = 1, 2


@contextmanager
def packages_of(wheels: Path | None) -> Iterator[list[str]]:
    """Install the wheels in the folder while the context is open.

    The wheels take precedence over the machine's own packages.

    Yields the folders that child processes must have on their path. Raises CannotRun.
    """
    inherited = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if wheels is None:
        yield inherited
        return
    with tempfile.TemporaryDirectory(prefix="tinsmith-wheels-") as site:
        _install(wheels, site)
        sys.path.insert(0, site)
        importlib.invalidate_caches()
        try:
            yield [site, *inherited]
        finally:
            sys.path.remove(site)


def _install(wheels: Path, site: str) -> None:
    files = sorted(str(file) for file in wheels.glob("*.whl"))
    if not files:
        raise CannotRun(f"{wheels} holds no wheels: `make gpu-wheels` fills such a folder where there is a network")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    finished = subprocess.run(
        [*command, "--no-cache-dir", "--target", site, *files], capture_output=True, text=True, check=False
    )
    if finished.returncode != 0:
        [*_, why] = finished.stderr.strip().splitlines() or ["pip says nothing"]
        raise CannotRun(f"the wheels of {wheels} cannot be installed for {sys.executable}: {why}")


def require_packages() -> None:
    """Raise CannotRun if packages are missing. The message of CannotRun is one sentence."""
    if missing := [name for name in NEEDED if not _is_there(name)]:
        raise CannotRun(
            f"{sys.executable} has no {', '.join(missing)}: install them there, bring them by --wheels, "
            "or name another by PYTHON="
        )


def device_name() -> str:
    """Return the name of the GPUs.

    Raises CannotRun if packages or GPUs are missing. The message of CannotRun is one sentence.
    """
    require_packages()
    import torch  # this import takes seconds, and torch may be missing

    if not torch.cuda.is_available():
        raise CannotRun(f"PyTorch {torch.__version__} of {sys.executable} sees no GPU: nvidia-smi says what there is")
    count = torch.cuda.device_count()
    return torch.cuda.get_device_name() if count == 1 else f"{count} x {torch.cuda.get_device_name()}"


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the name of a package that may contain this module
        return False


@dataclass
class Record:
    """The results up to now. The file with the results is complete at any moment."""

    run: Mapping[str, str]
    file: Path
    results: Sequence[Result] = ()
    reports: list[Mapping[str, Any]] = field(default_factory=list)
    measured: list[Mapping[str, Any]] = field(default_factory=list)

    def write(self) -> None:
        """Write the file. Raises CannotRun if the file cannot be written."""
        unfinished = self.file.with_suffix(".unfinished")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            gpu_reference.write(
                test_entries(gpu_reference.entries(), self.results, self.run),
                benchmark_entries(gpu_reference.entries("benchmark"), self.reports, self.run),
                calls_entries(gpu_reference.entries("calls"), self.measured, self.run),
                unfinished,
            )
            unfinished.replace(self.file)
        except OSError as error:
            raise CannotRun(f"{self.file} cannot be written: {error}. Name another folder by --out") from error


def run_tests(tests: Sequence[str], marker: str, seconds: float, packages: Sequence[str], record: Record) -> None:
    """Run the tests in order until the time limit.

    The record contains each result shortly after the end of the test.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "results"

        def note() -> None:
            record.results = run_results.read_results(file)
            record.write()

        program = [sys.executable, *PYTEST, "-m", marker, "--continue-on-collection-errors"]
        spread = ["--numprocesses", str(processes()), "--maxschedchunk", "1"]
        variables = {**environment_of_children(packages), run_results.FILE: str(file)}
        _run_for(seconds, [*program, *spread, *tests], variables, note)
        note()


def processes() -> int:
    """Return the number of processes that run tests at the same time on the GPUs.

    The models of the tests are tiny: a test keeps one core busy, and a GPU hardly at all.
    """
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2))


def environment_of_children(packages: Sequence[str]) -> dict[str, str]:
    path = os.pathsep.join([*(str(ROOT / source) for source in SOURCES), *packages])
    return {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _run_for(
    seconds: float, program: Sequence[str], environment: Mapping[str, str], meanwhile: Callable[[], None] = lambda: None
) -> int:
    """Run the program until the program ends or the time limit is reached. Return the exit status of the program.

    At the time limit, the program first gets a Ctrl-C, so that servers of the program end, too.
    """
    # A shell starts background programs with SIGINT ignored, and a child inherits that.
    command = ["env", "--default-signal=INT", *program]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, start_new_session=True)
    ends_at = time.monotonic() + seconds
    try:
        while (left := ends_at - time.monotonic()) > 0:
            if (status := _ended(process, min(left, NOTE_SECONDS))) is not None:
                return status
            meanwhile()
    except BaseException:  # a Ctrl-C at this program does not reach another session, so the tests would continue
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    os.killpg(process.pid, signal.SIGINT)
    if (status := _ended(process, END_SECONDS)) is not None:
        return status
    os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _ended(process: subprocess.Popen[bytes], patience_seconds: float) -> int | None:
    try:
        return process.wait(patience_seconds)
    except subprocess.TimeoutExpired:
        return None


def run_benchmark(name: str, options: Sequence[str], seconds: float, packages: Sequence[str]) -> dict[str, Any] | None:
    """Return the report of a benchmark in dev/benchmarks.

    Return None if the benchmark fails or takes too long, and print the reason on standard error.
    """
    program = [sys.executable, f"dev/benchmarks/{name}.py", *options, "--json"]
    try:
        completed = subprocess.run(
            program,
            cwd=ROOT,
            env={**os.environ, **environment_of_children(packages)},
            check=True,
            timeout=seconds,
            stdout=subprocess.PIPE,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"the benchmark {name} was not measured: {error}", file=sys.stderr)
        return None
    report: dict[str, Any] = json.loads(completed.stdout)
    return report


def test_entries(
    known: Sequence[Mapping[str, Any]], results: Sequence[Result], run: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the entries, updated with the tests that passed or failed in this run.

    For a skipped test, the entry of the previous run is kept.
    """
    counted = run_results.by_row([entry["name"] for entry in known], results)
    return [{**entry, **_run_of(counted.get(entry["name"]), run)} for entry in known]


def _run_of(result: Result | None, run: Mapping[str, str]) -> dict[str, Any]:
    if result is None or result.outcome == "skipped":
        return {}
    return {"run": {**run, "failed": result.reason} if result.outcome == "failed" else dict(run)}


def benchmark_entries(
    known: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]], run: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the entries, updated with the models that have a report. A side without figures gets no entry."""
    measured = [benchmark_entry(report, run) for report in reports if not _error_of(report)]
    models = {entry["model"] for entry in measured}
    return sorted(
        [*(dict(entry) for entry in known if entry["model"] not in models), *measured], key=lambda e: e["model"]
    )


def _error_of(report: Mapping[str, Any]) -> str | None:
    error: str | None = report["bare"]["error"] or report["engine"]["error"]
    return error


def benchmark_entry(report: Mapping[str, Any], run: Mapping[str, str]) -> dict[str, Any]:
    """Return one entry of the record.

    `engine`, `samples`: tokens per second. `ratio`: the engine's rate divided by the bare loop's rate.
    """
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


def calls_entries(
    known: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]], run: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the entries, updated with the models that have a report. `ms`: of a call, or of a decode step."""
    models = {report["model"] for report in reports}
    measured = [entry for report in reports for entry in _calls_entries_of(report, run)]
    return [*(dict(entry) for entry in known if entry["model"] not in models), *measured]


def _calls_entries_of(report: Mapping[str, Any], run: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for call in report["calls"]:
        seconds = call["seconds"]
        yield {
            "model": report["model"],
            "name": call["name"],
            "ms": round(seconds * 1e3, 1),
            "rate": round(call["tokens"] / seconds),
            "run": dict(run),
        }
    for decode in report["decodes"]:
        yield {
            "model": report["model"],
            "name": decode["name"],
            "ms": round(decode["step_seconds"] * 1e3, 1),
            "rate": round(decode["tokens_per_second"]),
            "run": dict(run),
        }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=RUN_SECONDS, help=f"of the whole run; {RUN_SECONDS:g} unless told"
    )
    parser.add_argument("--model", choices=BENCHMARK_SECONDS, default="0.6B", help="of the benchmark")
    parser.add_argument("--commit", default="", help="where the tree is no checkout")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, as `make gpu-wheels` makes it")
    parser.add_argument("--out", type=Path, help="the folder for gpu-runs.toml (default: docs)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    started = time.monotonic()
    try:
        with packages_of(options.wheels) as packages:
            return _run(options, packages, started)
    except CannotRun as error:
        print(f"gpu-run: {error}", file=sys.stderr)
        return NOTHING_RUN


def _run(options: argparse.Namespace, packages: Sequence[str], started: float) -> int:
    """Run the tests and the benchmark within the time limit. Return the exit status. Raises CannotRun."""
    run = {
        "device": device_name(),
        "commit": options.commit or commit_of(ROOT, *WRITTEN),
        "date": str(datetime.date.today()),
    }
    record = Record(run, options.out / gpu_reference.RUNS.name if options.out else gpu_reference.RUNS)
    record.write()
    print(f"{run['device']}, {', '.join(f'{name} {version(name)}' for name in TOLD)}", flush=True)
    kept = BENCHMARK_SECONDS[options.model] + END_SECONDS
    run_tests(TESTS, "gpu", options.seconds - kept - (time.monotonic() - started), packages, record)
    record.reports, record.measured = _benchmarks(options, started, packages)
    record.write()
    counts = Counter(result.outcome for result in record.results)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "no test ran"
    print(f"{run['device']}: {summary} in {time.monotonic() - started:.0f} s, written to {record.file}")
    is_complete = record.results and record.reports and record.measured
    return FAILED if counts["failed"] or not is_complete else 0


def _benchmarks(
    options: argparse.Namespace, started: float, packages: Sequence[str]
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the reports of both benchmarks. The list of a benchmark without a report is empty."""
    found = []
    for name in ("gpu_step", "gpu_calls"):
        seconds = max(options.seconds - (time.monotonic() - started), END_SECONDS)
        more = ["--decode", "--seconds", f"{seconds / 2:.0f}"] if name == "gpu_calls" else []
        report = run_benchmark(name, ["--model", options.model, *more], seconds, packages)
        found.append([report] if report else [])
    step, calls = found
    return step, calls


if __name__ == "__main__":
    sys.exit(main())
