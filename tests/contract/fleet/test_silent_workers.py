"""Workers and replicas that run and do not answer: what callers get, after which limit, and what comes afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from support.certificates import CLIENT, Authority, mount_secret
from support.server.fleet_under_test import START_SECONDS, worker_pid, worker_pids
from support.server.http_server import API_KEY, TestedServer, running_server
from tinsmith_server.errors import WorkerUnavailable
from tinsmith_server.fleet import client
from tinsmith_server.fleet.base import WorkerHandle
from tinsmith_server.fleet.channels import TlsDirectory
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_server.fleet.kubernetes.connector import Connector
from tinsmith_server.fleet.local import process
from tinsmith_server.fleet.local.fleet import LocalFleet
from tinsmith_server.settings import Settings
from tinsmith_server.store.store import Store
from tinsmith_trainer.worker.peers import API_SERVER


@pytest.fixture(autouse=True)
def _short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CHECK_EACH_SECONDS", 0.05)
    monkeypatch.setattr(process, "CHECK_SECONDS", 0.5)
    monkeypatch.setattr(process, "MOST_MISSED_CHECKS", 10_000)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def until_silent(worker: WorkerHandle) -> str:
    """Return the reason for waiting clients, as soon as the server has noticed."""
    async with asyncio.timeout(START_SECONDS):
        while worker.running() is not None:
            await asyncio.sleep(0.01)
    return worker.unavailable_reason or ""


async def test_callers_of_a_stopped_worker_get_the_reason_and_the_same_process_when_it_continues(
    local_fleet: LocalFleet,
) -> None:
    (worker,) = local_fleet.workers
    before, pid = await worker.connection(START_SECONDS), worker_pid()
    with stopped(pid):
        assert "has not answered for" in await until_silent(worker)
        with pytest.raises(WorkerUnavailable, match=r"overloaded or stopped; after 5000 s .* a new process continues"):
            await worker.connection(0)
    assert await worker.connection(START_SECONDS) is before
    assert (worker_pid(), worker.unavailable_reason) == (pid, None)


async def test_a_worker_that_stays_stopped_is_replaced_by_a_new_process(
    local_fleet: LocalFleet, store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (worker,) = local_fleet.workers
    before, pid = await worker.connection(START_SECONDS), worker_pid()
    monkeypatch.setattr(process, "MOST_MISSED_CHECKS", 2)
    os.kill(pid, signal.SIGSTOP)
    await until_silent(worker)
    assert await worker.connection(START_SECONDS) is not before
    assert pid not in worker_pids()
    assert (await store.get_worker(worker.worker_id)).epoch == 2
    assert "the process had not answered for 1 s, and was ended" in "".join(capfd.readouterr())


async def test_a_worker_with_an_operation_that_takes_too_long_is_replaced_and_the_reason_names_the_setting(
    settings: Settings, store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One rank of a divided model may be stopped, so that the others wait for it."""
    running = tmp_path / "model" / "running"
    running.write_text("101")
    fleet = LocalFleet(settings.model_copy(update={"hang_timeout_seconds": 100.0}))
    await fleet.open(store)
    (worker,) = fleet.workers
    before = await worker.connection(START_SECONDS)
    running.unlink()
    while await worker.connection(START_SECONDS) is before:
        await asyncio.sleep(0.01)
    assert "raise the setting hang_timeout_seconds, which is 100" in "".join(capfd.readouterr())
    await fleet.close()


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[TestedServer]:
    settings = Settings(**{**settings.model_dump(), "api_key": API_KEY, "poll_hold_seconds": 0.2})
    async with running_server(settings, LocalFleet(settings)) as server:
        yield server


async def test_an_operation_for_a_stopped_worker_is_accepted_and_its_poll_says_why_it_waits(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.services.training.submission.DEFER_AFTER_SECONDS", 0.1)
    async with serving(settings) as server:
        model_id = await server.model()
        (worker,) = server.fleet.workers
        with stopped(worker_pid()):
            await until_silent(worker)
            submitted = await server.forward_backward(model_id, 1)
            waiting = await server.result(submitted.json()["request_id"])
            assert (submitted.status_code, waiting.status_code) == (200, 408)
            assert waiting.json()["queue_state"] == "paused_capacity"
            assert "overloaded or stopped" in waiting.json()["queue_state_reason"]
        while (answer := await server.result(submitted.json()["request_id"])).status_code == 408:
            pass
        assert answer.status_code == 200


async def test_a_replica_that_accepts_connections_and_never_answers_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "QUICK_TIMEOUT_SECONDS", 0.3)

    async def describe(replica: GrpcWorkerClient) -> None:
        await replica.describe()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    authority = Authority()
    secret = mount_secret(tmp_path / "tls", authority.leaf(API_SERVER, usages=(CLIENT,)), authority)
    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    connector = Connector("replica fast-0", "uid-1", TlsDirectory(secret), lambda: address, describe)
    async with asyncio.timeout(START_SECONDS):
        while "has not answered Describe for 0.3 s" not in connector.failure:
            await asyncio.sleep(0.02)
    assert connector.client is None
    await connector.close()
    silent.close()
