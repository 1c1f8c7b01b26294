"""Tests of NeMo RL and of Miles themselves run on the pinned sources alone, and docs claim of them what they wrote."""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import backend_runs
import pytest
from backend_on_cpu import ROOT, SHARED_SHIMS, VERSIONS, Backend, Source, SourceMissing, check_source, pinned, run_tests
from backend_runs import KEYS, BackendRuns
from miles_on_cpu import MILES
from nemo_rl_on_cpu import NEMO_RL

BACKENDS = [NEMO_RL, MILES]
RUNS = [(backend_runs.NEMO_RL, "nemo-rl"), (backend_runs.MILES, "miles")]
SOURCE = Source("nemo-rl", "NEMO_RL")
RUN = dict.fromkeys(KEYS, "a word")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With one commit."""
    as_somebody = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], [*as_somebody, "commit", "--quiet", "--allow-empty", "--message=one"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


@pytest.fixture
def written(tmp_path: Path) -> BackendRuns:
    return replace(backend_runs.NEMO_RL, file=tmp_path / "runs.toml")


def wanted(commit: str) -> dict[str, str]:
    return {"repository": "https://example.org/nemo-rl", "commit": commit}


def test_sources_at_the_pinned_commits_are_taken(checkout: Path) -> None:
    asked = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    )
    assert check_source(SOURCE, str(checkout), wanted(asked.stdout.strip())) == checkout


@pytest.mark.parametrize(("path", "complaint"), [("", "is not given"), ("/nowhere", "is no checkout of git's")])
def test_sources_that_are_not_there_are_asked_for_with_the_command_that_fetches_them(path: str, complaint: str) -> None:
    with pytest.raises(SourceMissing, match=f"NEMO_RL.*{complaint}.*git checkout 0123abc"):
        check_source(SOURCE, path, wanted("0123abc"))


def test_sources_at_another_commit_are_refused(checkout: Path) -> None:
    with pytest.raises(SourceMissing, match=r"is at [0-9a-f]{40}, and the tests are for 0123abc"):
        check_source(SOURCE, str(checkout), wanted("0123abc"))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.marker)
def test_every_source_is_pinned_with_its_reason_and_every_folder_is_there(backend: Backend) -> None:
    for source in backend.sources:
        assert re.fullmatch("[0-9a-f]{40}", pinned(source)["commit"])
        assert {"repository", "reason"} <= pinned(source).keys()
    assert (backend.shims / "sitecustomize.py").is_file()
    assert SHARED_SHIMS.is_dir()
    assert (ROOT / backend.tests).is_dir()
    assert backend.packages.lock.is_file()


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.marker)
def test_without_sources_nothing_is_installed(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tests(backend, []) == 2
    assert f"{backend.sources[0].variable} is not given" in capsys.readouterr().err


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.marker)
def test_they_run_on_the_images_python_pytorch_and_ray(backend: Backend) -> None:
    versions = pinned(backend.sources[0])
    assert versions["python"]["version"].startswith(backend.packages.python)
    locked = backend.packages.lock.read_text()
    for package in ("torch", "ray"):
        assert f"\n{package}=={versions[package]['version']} " in locked


@pytest.mark.parametrize(("runs", "section"), RUNS)
def test_the_runs_that_docs_tell_of_are_of_the_pinned_sources_and_of_tests_that_there_are(
    runs: BackendRuns, section: str
) -> None:
    pin = tomllib.loads(VERSIONS.read_text())[section]["commit"]
    assert runs.pin() == pin, f"run `{runs.target}` at the new commit"
    for run in runs.runs():
        file, _, test = run["test"].partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()
        assert re.fullmatch(r"[0-9a-f]{7,40}", run["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"])


def test_a_run_takes_the_place_of_the_tests_last_one(written: BackendRuns) -> None:
    for test, deviation in (("b", "1"), ("a", "2"), ("b", "3")):
        written.note({**RUN, "test": test, "deviation": deviation}, "0123abc")
    assert [(run["test"], run["deviation"]) for run in written.runs()] == [("a", "2"), ("b", "3")]
    written.note({**RUN, "test": "c"}, "4567def")
    assert [run["test"] for run in written.runs()] == ["c"], "runs of another commit of the backend say nothing"


def test_a_run_that_says_half_is_refused(written: BackendRuns) -> None:
    written.file.write_text('nemo_rl = "0123abc"\n[[run]]\ntest = "a"\n')
    with pytest.raises(ValueError, match="a: a run has test, what"):
        written.runs()
