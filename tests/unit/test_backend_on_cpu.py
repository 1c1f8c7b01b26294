"""Tests of NeMo RL and of Miles themselves run on the pinned sources alone, and docs claim of them what they wrote."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import backend_runs
import pytest
from backend_on_cpu import ROOT, VERSIONS, Backend, Source, SourceMissing, check_source, pinned
from backend_runs import BackendRuns
from miles_on_cpu import MILES
from nemo_rl_on_cpu import NEMO_RL

BACKENDS = [NEMO_RL, MILES]
RUNS = [(backend_runs.NEMO_RL, "nemo-rl"), (backend_runs.MILES, "miles")]
SOURCE = Source("nemo-rl", "NEMO_RL")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with one commit."""
    as_a_committer = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], [*as_a_committer, "commit", "--quiet", "--allow-empty", "--message=one"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def pin_at(commit: str) -> dict[str, str]:
    return {"repository": "https://example.org/nemo-rl", "commit": commit}


def test_sources_at_another_commit_are_refused(checkout: Path) -> None:
    with pytest.raises(SourceMissing, match=r"is at [0-9a-f]{40}, and the tests are for 0123abc"):
        check_source(SOURCE, str(checkout), pin_at("0123abc"))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.marker)
def test_the_backends_run_with_the_python_the_pytorch_and_the_ray_of_the_image(backend: Backend) -> None:
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
