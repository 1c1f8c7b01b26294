"""Run the tests with other projects, and record the results.

Evidence.py [NAME...] Without names, the program runs all tests with other projects: `make evidence`. `make docs`
generates reference/evidence.md from the record. The program exits with 1 if a test fails. Failures are recorded, too.
"""

from __future__ import annotations

import datetime
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import evidence_reference
import run_results
from commits import CannotRun, commit_of
from evidence_reference import SUBJECTS, Subject
from run_results import Result

ROOT = Path(__file__).parents[2]
WRITTEN = ("docs/evidence.toml", "docs/reference/evidence.md")
FAILED, NOTHING_RUN = 1, 2


def run(subject: Subject) -> tuple[list[Result], int, float]:
    """Run the tests of the subject.

    Return the results of the tests, the exit status and the seconds. The output of the tests is printed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "outcomes"
        path = os.pathsep.join(str(ROOT / folder) for folder in ("dev/scripts", "dev/testcluster"))
        changed = {"PYTHONPATH": path, "PYTEST_ADDOPTS": "-p outcomes", run_results.FILE: str(file)}
        started = time.monotonic()
        ended = subprocess.run(shlex.split(subject.command), cwd=ROOT, env={**os.environ, **changed}, check=False)
        return run_results.read_results(file), ended.returncode, time.monotonic() - started


def entry_of(subject: Subject, results: Sequence[Result], status: int, seconds: float, commit: str) -> dict[str, str]:
    """Return the entry for docs/evidence.toml."""
    counts = Counter(result.outcome for result in results)
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if counts[outcome])
    verdict = told or ("passed" if status == 0 else "failed")
    if status and not counts["failed"]:
        verdict = f"exit status {status}"
    return {
        "name": subject.name,
        "versions": versions_of(subject, results),
        "outcome": f"{verdict} in {seconds:.0f} s",
        "commit": commit,
        "date": str(datetime.date.today()),
    }


def versions_of(subject: Subject, results: Sequence[Result]) -> str:
    """Return the versions of the subject's packages.

    If the tests run with several versions, return the versions with which the tests passed.
    """
    if subject.version_of:
        tested = [version_in(result.test) for result in results if result.outcome == "passed"]
        return f"{subject.version_of} {', '.join(tested)}"
    return ", ".join(evidence_reference.locked(package) for package in subject.packages)


def version_in(test: str) -> str:
    """Return the version in the parameter of a test."""
    found = re.search(r"\[(.+)\]", test)
    return found.group(1) if found else test


def main(names: Sequence[str]) -> int:
    known = {subject.name: subject for subject in SUBJECTS}
    if unknown := [name for name in names if name not in known]:
        print(f"evidence: there is no {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return NOTHING_RUN
    try:
        commit = commit_of(ROOT, *WRITTEN)
    except CannotRun as error:
        print(f"evidence: {error}", file=sys.stderr)
        return NOTHING_RUN
    statuses = []
    for subject in [known[name] for name in names or known]:
        results, status, seconds = run(subject)
        evidence_reference.note(entry_of(subject, results, status, seconds, commit))
        statuses.append(status)
    return FAILED if any(statuses) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
