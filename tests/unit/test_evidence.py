"""What ran of others' programs is written down by the run, and says of what it was."""

from __future__ import annotations

import shlex
from pathlib import Path

import evidence
import evidence_reference
import pytest
from evidence_reference import SUBJECTS, Subject
from run_results import Result

ROOT = Path(__file__).parents[2]
OF_VERSIONS = Subject("generations", "what", "true", version_of="tinker")
OF_PACKAGES = Subject("sdk", "what", "true", ("tinker",))


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_every_subject_is_of_tests_and_packages_that_there_are(subject: Subject) -> None:
    named = [part for part in shlex.split(subject.command) if part.startswith("tests/")]
    assert all((ROOT / part).exists() for part in named), named
    assert all(evidence_reference.locked(package) for package in subject.packages)


def test_a_run_names_the_versions_whose_tests_passed() -> None:
    results = [Result("a.py::test[0.3.0]", "passed", ""), Result("a.py::test[0.6.3]", "failed", "a reason")]
    entry = evidence.entry_of(OF_VERSIONS, results, 1, 12.4, "abcdef1")
    assert (entry["versions"], entry["outcome"]) == ("tinker 0.3.0", "1 passed, 1 failed in 12 s")


def test_a_command_that_failed_without_a_test_that_did_is_no_success() -> None:
    entry = evidence.entry_of(OF_PACKAGES, [Result("a.py::test", "passed", "")], 2, 1.0, "abcdef1")
    assert entry["outcome"] == "exit status 2 in 1 s"
    assert entry["versions"] == evidence_reference.locked("tinker")


def test_a_subjects_run_replaces_its_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_reference, "RUNS", tmp_path / "evidence.toml")
    for seconds in (1.0, 2.0):
        evidence_reference.note(evidence.entry_of(OF_PACKAGES, [], 0, seconds, "abcdef1"))
    assert [run["outcome"] for run in evidence_reference.runs().values()] == ["passed in 2 s"]


def test_what_is_asked_for_and_not_there_is_told_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence.main(["nothing"]) == evidence.NOTHING_RUN
    assert "there is no nothing; there are generations" in capsys.readouterr().err
