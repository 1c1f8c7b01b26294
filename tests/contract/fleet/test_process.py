"""A worker's process as its server hears it."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from pathlib import Path

import pytest
from tinsmith_server.fleet.local.process import SENTENCE_PREFIX, WorkerProcess

TALKS_AND_ENDS = f"""
import sys
for _ in range(20_000):
    print("a line of a log that is about a hundred characters long, as most of them are, or longer", file=sys.stderr)
print("{SENTENCE_PREFIX}the model cannot be loaded", file=sys.stderr)
sys.exit(3)
"""


class FullDisk:
    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        pass


async def test_the_output_of_a_worker_is_read_to_its_end_even_if_it_cannot_be_forwarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would stop at its own log as soon as the pipe is full, and every client with it."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        command = [sys.executable, "-c", TALKS_AND_ENDS]
        process = await WorkerProcess.start(lambda _socket, _lifeline: command, Path(folder) / "socket", {})
        monkeypatch.setattr(sys, "stderr", FullDisk())
        assert await process.wait() == 3
        assert process.cause_of_death().endswith("the model cannot be loaded")
        await process.discard()
