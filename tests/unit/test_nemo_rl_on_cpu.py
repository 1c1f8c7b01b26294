"""The tests of NeMo RL itself run against the pinned sources alone, and what docs claim of them is what they wrote."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import nemo_rl_on_cpu
import nemo_rl_reference
import pytest
from nemo_rl_on_cpu import SOURCES, SourceMissing, check_source

ROOT = Path(__file__).parents[2]
VERSIONS = tomllib.loads((ROOT / "trainer_image" / "versions.toml").read_text())
[NEMO_RL, *_] = SOURCES
RUN = dict.fromkeys(nemo_rl_reference.KEYS, "a word")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With one commit."""
    as_somebody = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], [*as_somebody, "commit", "--quiet", "--allow-empty", "--message=one"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def wanted(commit: str) -> dict[str, str]:
    return {"repository": "https://example.org/nemo-rl", "commit": commit}


def test_sources_at_the_pinned_commits_are_taken(checkout: Path) -> None:
    asked = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    )
    assert check_source(NEMO_RL, str(checkout), wanted(asked.stdout.strip())) == checkout


@pytest.mark.parametrize(("path", "complaint"), [("", "is not given"), ("/nowhere", "is no checkout of git's")])
def test_sources_that_are_not_there_are_asked_for_with_the_command_that_fetches_them(path: str, complaint: str) -> None:
    with pytest.raises(SourceMissing, match=f"NEMO_RL.*{complaint}.*git checkout 0123abc"):
        check_source(NEMO_RL, path, wanted("0123abc"))


def test_sources_at_another_commit_are_refused(checkout: Path) -> None:
    with pytest.raises(SourceMissing, match=r"is at [0-9a-f]{40}, and the tests are for 0123abc"):
        check_source(NEMO_RL, str(checkout), wanted("0123abc"))


def test_every_source_is_pinned_with_its_reason() -> None:
    for source in SOURCES:
        assert re.fullmatch("[0-9a-f]{40}", VERSIONS[source.section]["commit"])
        assert {"repository", "reason"} <= VERSIONS[source.section].keys()


def test_without_sources_nothing_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert nemo_rl_on_cpu.main([]) == 2
    assert "NEMO_RL is not given" in capsys.readouterr().err


def test_the_runs_that_docs_tell_of_are_of_the_pinned_sources_and_of_tests_that_there_are() -> None:
    assert nemo_rl_reference.pin() == VERSIONS["nemo-rl"]["commit"], "run `make test-nemo-rl` at the new commit"
    for run in nemo_rl_reference.runs():
        file, _, test = run["test"].partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()
        assert re.fullmatch(r"[0-9a-f]{7,40}", run["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"])


def test_a_run_takes_the_place_of_the_tests_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo_rl_reference, "RUNS", tmp_path / "runs.toml")
    for test, deviation in (("b", "1"), ("a", "2"), ("b", "3")):
        nemo_rl_reference.note({**RUN, "test": test, "deviation": deviation}, "0123abc")
    assert [(run["test"], run["deviation"]) for run in nemo_rl_reference.runs()] == [("a", "2"), ("b", "3")]
    nemo_rl_reference.note({**RUN, "test": "c"}, "4567def")
    assert [run["test"] for run in nemo_rl_reference.runs()] == ["c"], "runs of another commit of NeMo RL say nothing"


def test_a_run_that_says_half_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemo_rl_reference, "RUNS", tmp_path / "runs.toml")
    nemo_rl_reference.RUNS.write_text('nemo_rl = "0123abc"\n[[run]]\ntest = "a"\n')
    with pytest.raises(ValueError, match="a: a run has test, what"):
        nemo_rl_reference.runs()
