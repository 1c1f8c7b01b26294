"""`tinsmith serve` with a fake worker in the place of the real one: the whole server, and nothing that computes.

Run with `python -m support.server.serve_with_fake_worker`, and the flags of `tinsmith serve`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from tinsmith_server.cli.serving import serve
from tinsmith_server.fleet.local.commands import WorkerCommand

_real = WorkerCommand.__call__


def _command(self: WorkerCommand, socket: Path, parent_fd: int) -> list[str]:
    return [sys.executable, "-m", "support.server.fake_worker_program", *_real(self, socket, parent_fd)[3:]]


if __name__ == "__main__":
    WorkerCommand.__call__ = _command  # type: ignore[method-assign]
    typer.run(serve)
