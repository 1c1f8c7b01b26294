"""Adapters that come in are looked at one at a time, whoever has stopped waiting for them."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.worker.in_process import Worker
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.training.executor import Executor


async def test_the_next_one_waits_for_what_a_caller_has_given_up(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
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
