"""System programs. A failed program raises an error with one sentence."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from testcluster.errors import ClusterError


def run(*command: str | Path, stdin: str | None = None, seconds: float = 120.0) -> str:
    """Run a command, and return the standard output.

    Raises ClusterError with the standard error of a failed command.
    """
    finished = attempt(*command, stdin=stdin, seconds=seconds)
    if finished.returncode != 0:
        words = finished.stderr.strip() or f"exit status {finished.returncode}"
        raise ClusterError(f"{_readable(command)} failed: {words}")
    return finished.stdout


def attempt(*command: str | Path, stdin: str | None = None, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run a command. A failed command raises no error."""
    try:
        return subprocess.run(
            [str(word) for word in command],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{command[0]} is not installed.") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{_readable(command)} did not end within {seconds:.0f} s.") from error


def _readable(command: Sequence[str | Path]) -> str:
    return " ".join(Path(word).name if index == 0 else str(word) for index, word in enumerate(command))
