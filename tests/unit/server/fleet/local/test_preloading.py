"""The progress of a process that is started before its first request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tinsmith_server.errors import WorkerUnavailable, WorkerUnstartable
from tinsmith_server.fleet.local.supervisor import ProcessLimits, ProcessSupervisor


@pytest.mark.parametrize(
    ("end", "last_line"),
    [
        (None, "org/tiny is ready after 0 s"),
        (WorkerUnstartable("config.json is missing"), "org/tiny cannot be served: config.json is missing"),
    ],
    ids=["ready", "unstartable"],
)
async def test_progress_is_told_until_the_process_is_ready_or_needs_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Exception | None, last_line: str
) -> None:
    answers: list[Exception | None] = [WorkerUnavailable("loading, 10 s so far"), end]

    async def connection(_timeout_seconds: float) -> Any:
        if (error := answers.pop(0)) is not None:
            raise error

    process = ProcessSupervisor(
        "tiny", "org/tiny", lambda _socket, _fd: [], tmp_path, role="worker", device={}, limits=ProcessLimits()
    )
    monkeypatch.setattr(process, "connection", connection)
    lines: list[str] = []
    await process.preload(lines.append)
    assert lines == ["loading base model org/tiny", "loading, 10 s so far", last_line]
