"""The parity gate as a test asks it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.tiny import tiny_directory


def parity(one: str, other: str, *, atol: float, steps: int = 3, model: Path | None = None) -> None:
    """Fails unless the two engines agree; pytest then shows the table.

    In a process of its own: there is one Ray in a process, and other tests keep theirs.
    """
    command = [sys.executable, "-m", "tinsmith_trainer.parity.command", "--engine", one, "--engine", other]
    options = ["--model", str(model or tiny_directory()), "--steps", str(steps), "--atol", str(atol)]
    finished = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, f"{one} and {other} differ:\n{finished.stdout}{finished.stderr}"
