"""`make gpu-run`: what ran on a GPU is written down as it was, in time, and nothing else is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_reference
import gpu_run
import outcomes
import pytest
import run_results
import torch
from commits import CannotRun, commit_of
from run_results import Outcome, Result

RUN = {"device": "NVIDIA H100", "commit": "0123abc", "date": "2026-11-30"}
EARLIER = {"device": "NVIDIA A100", "commit": "fedcba9", "date": "2026-10-01"}
REPORT: dict[str, Any] = {
    "model": "0.6B",
    "dtype": "bfloat16",
    "rows": 8,
    "tokens": 512,
    "bare": {"tokens_per_second": 1000.0, "peak_gb": 9.0, "error": None},
    "engine": {"tokens_per_second": 1250.0, "peak_gb": 4.25, "error": None},
    "sampled_tokens_per_second": 300.0,
}
CALLS: dict[str, Any] = {
    "model": "8B",
    "calls": [{"name": "8 x 512", "tokens": 4096, "forwards": 1, "seconds": 0.256, "peak_gb": 50.0}],
    "decodes": [{"name": "decode of 8 rows", "step_seconds": 0.02, "tokens_per_second": 400.0}],
}
BROKEN = "import no_such_package_at_all"
TESTS = """
import pytest

def test_it_holds(): pass

@pytest.mark.parametrize("number", [1, 2])
def test_of_two(number): assert number == 1, "one and no other"

def test_it_needs_more(): pytest.skip("needs two GPUs")
"""


def entry(name: str, **more: object) -> dict[str, Any]:
    return {"name": name, "needs": "one GPU", **more}


def result(test: str, outcome: Outcome, reason: str = "") -> Result:
    return Result(test, outcome, reason)


def outcomes_of(folder: Path, *arguments: str) -> list[Result]:
    """Return what pytest with the plugin records of the folder's tests."""
    results = folder / "results"
    scripts = str(Path(run_results.__file__).parent)
    plugins = ["-p", "outcomes", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": scripts, run_results.FILE: str(results)},
        check=False,
        capture_output=True,
    )
    return run_results.read_results(results)


def test_a_worker_that_crashes_is_named_without_paths_of_the_machine() -> None:
    report = pytest.TestReport("t.py::test_one", ("t.py", 1, ""), {}, "failed", None, "???")
    report.longrepr = "[gw7] linux -- Python 3.12.3 /opt/python3\nworker 'gw7' crashed while running 't.py::test_one'"
    assert outcomes.reason_of(report) == "worker 'gw7' crashed while running 't.py::test_one'"


@pytest.mark.parametrize("processes", [0, 1])
def test_outcomes_are_written_as_tests_end_and_of_modules_that_cannot_be_imported(
    tmp_path: Path, processes: int
) -> None:
    (tmp_path / "test_three.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text(BROKEN)
    found = outcomes_of(tmp_path, "--numprocesses", str(processes))
    assert sorted(found, key=lambda one: one.test) == [
        result("test_broken.py", "failed", "ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        result("test_three.py::test_it_holds", "passed"),
        result("test_three.py::test_it_needs_more", "skipped", "needs two GPUs"),
        result("test_three.py::test_of_two[1]", "passed"),
        result("test_three.py::test_of_two[2]", "failed", "AssertionError: one and no other"),
    ]


def test_one_failed_parameter_fails_a_row() -> None:
    rows = [entry("tests/gpu/test_a.py::test_one", run=EARLIER), entry("tests/contract/engine", promise="it holds")]
    told = [
        result("tests/gpu/test_a.py::test_one[x]", "failed", "a | b"),
        result("tests/gpu/test_a.py::test_one[y]", "passed"),
        result("tests/contract/engine/test_b.py::test_two[gpu]", "passed"),
        result("tests/contract/engine/test_b.py::test_three[gpu]", "skipped"),
    ]
    one, folder = gpu_run.test_entries(rows, told, RUN)
    assert one["run"] == {**RUN, "failed": "a | b"}
    assert folder["run"] == RUN


def test_a_skipped_or_late_test_keeps_its_last_run() -> None:
    rows = [
        entry("t.py::test_skipped", run=EARLIER),
        entry("t.py::test_not_reached", run=EARLIER),
        entry("t.py::test_new"),
    ]
    told = [result("t.py::test_skipped", "skipped", "needs two GPUs")]
    assert gpu_run.test_entries(rows, told, RUN) == rows


def test_a_side_that_ran_out_of_memory_is_no_measurement() -> None:
    report = {**REPORT, "bare": {"tokens_per_second": 0.0, "error": "out of memory"}}
    assert gpu_run.benchmark_entries([], [report], RUN) == []


def test_the_written_runs_are_the_runs_in_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_reference, "RUNS", tmp_path / "runs.toml")
    failed = entry("a.py::test_b", run={**RUN, "failed": 'it said "no"\\'})
    gpu_reference.write([failed], [gpu_run.benchmark_entry(REPORT, RUN)], gpu_run.calls_entries([], [CALLS], RUN))
    assert gpu_reference.entries() == [failed]
    [row] = gpu_reference.run_rows()
    assert row[2] == "**failed**: H100, 0123abc"
    [measured] = gpu_reference.benchmark_rows()
    assert measured[:5] == ("0.6B in bfloat16, 8 x 512 tokens", "1,250", "1.25", "4.2 GB", "300")
    assert [row[:3] for row in gpu_reference.calls_rows()] == [
        ("8B: 8 x 512", "256.0 ms", "16,000"),
        ("8B: decode of 8 rows", "20.0 ms", "400"),
    ]


def test_a_record_is_whole_while_tests_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.toml"
    monkeypatch.setattr(gpu_reference, "RUNS", rows)
    gpu_reference.write([entry("t.py::test_one"), entry("t.py::test_two")], [])
    # The output folder of a run need not exist.
    record = gpu_run.Record(RUN, tmp_path / "results" / "gpu-runs.toml", [result("t.py::test_one", "passed")])
    record.write()
    before = rows.read_text()
    monkeypatch.setattr(gpu_reference, "RUNS", record.file)
    assert [one.get("run") for one in gpu_reference.entries()] == [RUN, None]
    assert before == rows.read_text()


@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_a_program_that_outlasts_its_time_is_ended_as_by_ctrl_c(inherited: Any) -> None:
    before = signal.signal(signal.SIGINT, inherited)
    try:
        status = gpu_run._run_for(0.2, [sys.executable, "-c", "import time; time.sleep(600)"], {})
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == -signal.SIGINT


@pytest.mark.parametrize("missing", ["gpu_step", "gpu_calls", None])
def test_a_run_without_one_of_its_benchmarks_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str | None
) -> None:
    def run_tests(_tests: object, _marker: str, _seconds: float, _packages: object, record: gpu_run.Record) -> None:
        record.results = [result("t.py::test_one", "passed")]

    reports = {"gpu_step": REPORT, "gpu_calls": CALLS, missing: None}
    monkeypatch.setattr(gpu_run, "device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(gpu_run, "run_tests", run_tests)
    monkeypatch.setattr(gpu_run, "run_benchmark", lambda name, *_: reports[name])
    status = gpu_run.main(["--commit", "0123abc", "--out", str(tmp_path)])
    assert status == (gpu_run.FAILED if missing else 0)


def test_a_machine_without_a_gpu_gets_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_run.main(["--commit", "0123abc"]) == gpu_run.NOTHING_RUN
    assert "sees no GPU" in capsys.readouterr().err


IMPORTS = """
import builtins, json, os, pathlib, sys

ROOT, imported, plain = pathlib.Path.cwd(), set(), builtins.__import__

def __import__(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__file__") or ""
    if level == 0 and importer.startswith(str(ROOT)) and "site-packages" not in importer:
        imported.add(name.partition(".")[0])
    return plain(name, globals, locals, fromlist, level)

builtins.__import__ = __import__

def pytest_collection_finish(session):
    pathlib.Path(os.environ["IMPORTED"]).write_text(json.dumps(sorted(imported - sys.stdlib_module_names)))
"""


@pytest.mark.slow("collects tests in processes of their own, which import PyTorch")
def test_the_requirements_name_every_package_that_gpu_tests_import(tmp_path: Path) -> None:
    (tmp_path / "imports_seen.py").write_text(IMPORTS)
    collect = ["-m", "pytest", "-p", "imports_seen", "-p", "no:cacheprovider", "--collect-only", "-q", "-m", "gpu"]
    path = os.pathsep.join([str(tmp_path), gpu_run.environment_of_children(())["PYTHONPATH"]])
    subprocess.run(
        [sys.executable, *collect, *gpu_run.TESTS],
        cwd=gpu_run.ROOT,
        env={**os.environ, "PYTHONPATH": path, "IMPORTED": str(tmp_path / "imported")},
        check=True,
        capture_output=True,
    )
    imported = set(json.loads((tmp_path / "imported").read_text()))
    places = (*gpu_run.SOURCES, "tests", "dev/testcluster", "dev/benchmarks")
    own = {child.stem for place in places for child in (gpu_run.ROOT / place).iterdir()}
    needed = {name.partition(".")[0] for name in gpu_run.NEEDED} | {"_pytest"}  # which is pytest's own
    assert imported - own - needed == set()


def test_a_run_is_of_a_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    with pytest.raises(CannotRun, match="by COMMIT="):
        commit_of(tmp_path)
    git("init")
    (tmp_path / "file").write_text("one")
    git("add", ".")
    git("commit", "--message", "one")
    assert len(commit_of(tmp_path)) == 7
    (tmp_path / "file").write_text("two")
    with pytest.raises(CannotRun, match="has changes: M file"):
        commit_of(tmp_path)
