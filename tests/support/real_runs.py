"""A run of a backend itself, written down where its page says what has run."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from backend_runs import BackendRuns

ROOT = Path(__file__).parents[2]

Note = Callable[[str, str, str], None]
"""The test that ran, the allowed difference, and the measured one."""


def noted(request: pytest.FixtureRequest, runs: BackendRuns, pin: str) -> Note:
    """Write down at a test's end that it ran."""

    def write(what: str, tolerance: str, deviation: str) -> None:
        run = {
            "test": request.node.nodeid,
            "what": what,
            "tolerance": tolerance,
            "deviation": deviation,
            "commit": _commit(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        runs.note(run, pin)

    return write


def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return asked.stdout.strip()
