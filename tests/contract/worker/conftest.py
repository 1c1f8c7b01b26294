"""A worker's service in this process, on the reference engine; time moves only when a test says so."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from support.worker.in_process import Worker
from tinsmith_trainer.checkpoints.snapshots import Snapshot, SnapshotFile, SnapshotFolder

StartWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[StartWorker]:
    """Return a function that starts a worker on the test's volume, activated; a second call is its successor."""
    workers: list[Worker] = []

    async def start(**options: Any) -> Worker:
        for predecessor in workers:
            await predecessor.service.drain()
        worker = Worker(tmp_path, **options)
        workers.append(worker)
        await worker.service.activate(len(workers))
        return worker

    yield start
    for worker in workers:
        await worker.service.drain()


@pytest.fixture
async def worker(start: StartWorker) -> Worker:
    return await start()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Model and last operation of every snapshot that is written."""
    found: list[tuple[str, int]] = []
    write = SnapshotFolder.write

    def note(folder: SnapshotFolder, snapshot: Snapshot) -> SnapshotFile:
        found.append((snapshot.model_id, snapshot.applied))
        return write(folder, snapshot)

    monkeypatch.setattr(SnapshotFolder, "write", note)
    return found


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Future[int]:
    """Return the code with which the process would have ended."""
    ended: Future[int] = Future()
    monkeypatch.setattr(os, "_exit", lambda code: None if ended.done() else ended.set_result(code))
    return ended
