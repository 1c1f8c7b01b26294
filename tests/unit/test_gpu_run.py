"""`make gpu-run`: what ran on a GPU is written down as it was, in time, and nothing else is."""

from __future__ import annotations

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
import torch
from commits import CannotRun, commit_of
from outcomes import Outcome, Result

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


def test_outcomes_are_written_as_tests_end(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(TESTS)
    results = tmp_path / "results"
    scripts = str(Path(outcomes.__file__).parent)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "outcomes", "-p", "no:cacheprovider", "test_three.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": scripts, outcomes.FILE: str(results)},
        check=False,
        capture_output=True,
    )
    assert outcomes.read_results(results) == [
        result("test_three.py::test_it_holds", "passed"),
        result("test_three.py::test_of_two[1]", "passed"),
        result("test_three.py::test_of_two[2]", "failed", "AssertionError: one and no other"),
        result("test_three.py::test_it_needs_more", "skipped", "needs two GPUs"),
    ]


def test_one_failure_among_a_rows_parameters_is_what_counts() -> None:
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


def test_what_was_skipped_or_had_no_time_keeps_its_last_run() -> None:
    rows = [
        entry("t.py::test_skipped", run=EARLIER),
        entry("t.py::test_not_reached", run=EARLIER),
        entry("t.py::test_new"),
    ]
    told = [result("t.py::test_skipped", "skipped", "needs two GPUs")]
    assert gpu_run.test_entries(rows, told, RUN) == rows


def test_a_measurement_replaces_that_of_the_same_model_alone() -> None:
    large = {**gpu_run.benchmark_entry(REPORT, EARLIER), "model": "8B"}
    small = gpu_run.benchmark_entry(REPORT, EARLIER)
    anew = gpu_run.benchmark_entries([large, small], [REPORT], RUN)
    assert [(one["model"], one["run"]) for one in anew] == [("0.6B", RUN), ("8B", EARLIER)]
    assert anew[0]["ratio"] == 1.25


def test_a_side_that_ran_out_of_memory_is_no_measurement() -> None:
    report = {**REPORT, "bare": {"tokens_per_second": 0.0, "error": "out of memory"}}
    assert gpu_run.benchmark_entries([], [report], RUN) == []


def test_what_is_written_is_what_docs_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_reference, "RUNS", tmp_path / "runs.toml")
    failed = entry("a.py::test_b", run={**RUN, "failed": 'it said "no"\\'})
    gpu_reference.write([failed], [gpu_run.benchmark_entry(REPORT, RUN)])
    assert gpu_reference.entries() == [failed]
    [row] = gpu_reference.run_rows()
    assert row[2] == '**failed** (it said "no"\\) on NVIDIA H100 at commit 0123abc, 2026-11-30'
    [measured] = gpu_reference.benchmark_rows()
    assert measured[:5] == ("0.6B in bfloat16, 8 x 512 tokens", "1,250", "1.25", "4.2 GB", "300")


@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_a_program_that_outlasts_its_time_is_ended_as_by_ctrl_c(inherited: Any) -> None:
    before = signal.signal(signal.SIGINT, inherited)
    try:
        status = gpu_run._run_for(0.2, [sys.executable, "-c", "import time; time.sleep(600)"], {})
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == -signal.SIGINT


def test_a_machine_without_a_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_run.main(["--commit", "0123abc"]) == gpu_run.NOTHING_RUN
    assert "sees no GPU" in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "NEEDED", ("pytest", "no_such_package"))
    with pytest.raises(CannotRun, match="has no no_such_package: install"):
        gpu_run.device_name()


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
