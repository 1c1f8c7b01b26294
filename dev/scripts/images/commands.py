"""Commands of the image tools. A failed command raises ImageError."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


class ImageError(Exception):
    """An error with a text that says what happened, which object is concerned, and what to do."""


TAIL_LINES = 25


def run(*command: str | Path, seconds: float | None = None) -> str:
    """Run a command, and return the standard output. Raises ImageError after a failure or a timeout."""
    try:
        finished = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except FileNotFoundError as error:
        raise ImageError(f"{command[0]} is not installed.") from error
    except subprocess.TimeoutExpired as error:
        raise ImageError(f"{_readable(command)} did not end within {seconds:.0f} s.") from error
    _check(command, finished.returncode, finished.stderr)
    return finished.stdout


def run_logged(log: Path, *command: str | Path) -> None:
    """Run a long command, and append the output to `log`. Raises ImageError with the end of the log."""
    with log.open("a") as file:
        finished = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False)
    _check(command, finished.returncode, log.read_text(errors="replace"))


def succeeds(*command: str | Path, seconds: float = 60.0) -> bool:
    """Return whether the command succeeds. A missing command, or a command that takes too long, has not succeeded."""
    try:
        run(*command, seconds=seconds)
    except ImageError:
        return False
    return True


def _check(command: Sequence[str | Path], status: int, output: str) -> None:
    if status != 0:
        tail = "\n".join(output.strip().splitlines()[-TAIL_LINES:])
        raise ImageError(f"{_readable(command)} failed with status {status}:\n{tail}")


def _readable(command: Sequence[str | Path]) -> str:
    return " ".join(str(word) for word in command[:3])
