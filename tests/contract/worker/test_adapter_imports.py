"""Adapter imports, which are checked one at a time, even after their callers have left."""

from __future__ import annotations

import asyncio
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.worker.in_process import Worker
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.errors import Draining, UserError
from tinsmith_trainer.training.executor import Executor
from tinsmith_trainer.worker.service import NotActive


async def test_the_next_import_waits_for_an_abandoned_one(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()
    running: list[int] = []
    most = 0

    def reading(self: Executor, request: worker_pb2.ImportAdapterRequest) -> worker_pb2.ImportAdapterReply:
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        begun.release()
        assert go_on.wait(60)
        running.pop()
        return worker_pb2.ImportAdapterReply(directory=request.directory)

    monkeypatch.setattr(Executor, "import_adapter", reading)
    first = asyncio.ensure_future(worker.service.import_adapter(worker_pb2.ImportAdapterRequest(directory="one")))
    await asyncio.to_thread(begun.acquire)
    first.cancel()
    second = asyncio.ensure_future(worker.service.import_adapter(worker_pb2.ImportAdapterRequest(directory="two")))
    await asyncio.wait([first])
    go_on.set()
    assert (await second).directory == "two"
    assert most == 1


async def test_a_refused_one_lets_the_next_in(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(self: Executor, request: worker_pb2.ImportAdapterRequest) -> worker_pb2.ImportAdapterReply:
        raise UserError("no adapter")

    monkeypatch.setattr(Executor, "import_adapter", refusing)
    for _ in range(2):
        with pytest.raises(UserError, match="no adapter"):
            await worker.service.import_adapter(worker_pb2.ImportAdapterRequest())


@pytest.mark.parametrize("rank", [17, 2**31 - 1])
async def test_a_rank_above_the_limit_is_refused_before_a_file_is_read(worker: Worker, rank: int) -> None:
    request = worker_pb2.ImportAdapterRequest(directory="none", lora=worker_pb2.LoraConfig(rank=rank, train_attn=True))
    with pytest.raises(UserError, match=f"rank {rank}; this worker's limit is 16, its max_rank"):
        await worker.service.import_adapter(request)


async def test_an_import_that_has_not_begun_is_refused_when_the_worker_stops(worker: Worker) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def in_a_turn() -> None:
        begun.set()
        assert go_on.wait(60)

    worker.service.queues.between_turns(in_a_turn)
    await asyncio.to_thread(begun.wait)
    waiting = asyncio.ensure_future(worker.service.import_adapter(worker_pb2.ImportAdapterRequest(directory="one")))
    await asyncio.sleep(0)
    draining = asyncio.ensure_future(worker.service.drain())
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(Draining, match="shutting down"):
        await waiting
    await draining


async def test_an_import_in_progress_finishes_when_the_worker_stops(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def reading(self: Executor, request: worker_pb2.ImportAdapterRequest) -> worker_pb2.ImportAdapterReply:
        begun.set()
        assert go_on.wait(60)
        return worker_pb2.ImportAdapterReply(directory=request.directory)

    monkeypatch.setattr(Executor, "import_adapter", reading)
    under_way = asyncio.ensure_future(worker.service.import_adapter(worker_pb2.ImportAdapterRequest(directory="one")))
    await asyncio.to_thread(begun.wait)
    draining = asyncio.ensure_future(worker.service.drain())
    await asyncio.sleep(0)
    go_on.set()
    assert (await under_way).directory == "one"
    await draining


async def test_a_worker_that_no_server_has_activated_reads_none(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    with pytest.raises(NotActive, match="has not been activated"):
        await worker.service.import_adapter(worker_pb2.ImportAdapterRequest(directory="one"))
    await worker.service.drain()


async def test_a_reported_error_does_not_keep_the_files_in_memory(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[weakref.ref[Any]] = []

    def refusing(self: Executor, request: worker_pb2.ImportAdapterRequest) -> worker_pb2.ImportAdapterReply:
        content = np.zeros(1)
        files.append(weakref.ref(content))
        try:
            raise ValueError("no header")
        except ValueError as error:
            raise UserError("no adapter") from error

    monkeypatch.setattr(Executor, "import_adapter", refusing)
    with pytest.raises(UserError) as told:
        await worker.service.import_adapter(worker_pb2.ImportAdapterRequest())
    assert (str(told.value), told.value.__cause__, files[0]()) == ("no adapter", None, None)
