"""Runs programs in forks of one Python that is warm: `warm_python.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PROGRAM_SECONDS = 900.0
"""Recipes wait for a server without limit, so that a hang must end here."""
WARM_PYTHON = Path(__file__).with_name("warm_python.py")


class Python:
    """Starts with the first program: what packages read of the environment at their import is that one's."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], typed: str) -> tuple[int, str]:
        """Return the status and the output of `python command…`.

        A command that takes longer than PROGRAM_SECONDS is killed, with all that it started.
        """
        if self._process is None:
            self._process = _start(environment)
        with tempfile.TemporaryDirectory(prefix="program-") as scratch:
            reads, writes = Path(scratch, "input"), Path(scratch, "output")
            reads.write_text(typed)
            request = {"command": [*command], "folder": str(folder), "environment": {**environment}}
            _say(self._process, {**request, "input": str(reads), "output": str(writes)})
            watch = threading.Timer(PROGRAM_SECONDS, _end, (_hear(self._process)["pid"],))
            watch.start()
            try:
                return _hear(self._process)["status"], writes.read_text()
            finally:
                watch.cancel()

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def _start(environment: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, str(WARM_PYTHON)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _end(pid: int) -> None:
    """End a program and all that it started. It may just have ended itself."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _say(process: subprocess.Popen[str], request: Mapping[str, object]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    heard: dict[str, Any] = json.loads(process.stdout.readline())
    return heard
