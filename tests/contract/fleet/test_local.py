"""The local fleet: child processes that start at first use, come back by themselves, and end with the server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import ModelUnloadable, StartupError, WorkerUnavailable
from tinsmith_server.fleet.local import LocalFleet, WorkerCommand
from tinsmith_server.fleet.supervisor import Supervisor
from tinsmith_server.settings import Settings
from tinsmith_server.store.engine import SqlStore, open_store

START_SECONDS = 30.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = await open_store(f"sqlite:///{tmp_path / 'store.db'}")
    yield store
    await store.close()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """One model directory under two names, and the fake worker in the real one's place."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    real = WorkerCommand.__call__

    def command(self: WorkerCommand, socket: Path, parent_fd: int) -> list[str]:
        return [sys.executable, "-m", "support.fake_worker_program", *real(self, socket, parent_fd)[3:]]

    monkeypatch.setattr(WorkerCommand, "__call__", command)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return Settings(data=tmp_path / "data", models=(f"a={model}", f"b={model}"), lora_alpha=32)


@pytest.fixture
async def fleet(settings: Settings, store: SqlStore) -> AsyncIterator[LocalFleet]:
    fleet = LocalFleet(settings)
    await fleet.open(store)
    yield fleet
    await fleet.close()


def only_worker(fleet: LocalFleet) -> Supervisor:
    (worker,) = fleet.workers
    assert isinstance(worker, Supervisor)
    return worker


def seen(tmp_path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tmp_path / "model" / "seen.json").read_text())
    return content


async def test_names_that_share_a_directory_share_a_process_started_at_first_use(
    fleet: LocalFleet, store: SqlStore
) -> None:
    worker = only_worker(fleet)
    assert worker.running() is None
    first, second = await asyncio.gather(worker.connection(START_SECONDS), worker.connection(START_SECONDS))
    assert first is second
    row = await store.get_worker(worker.worker_id)
    description = await first.describe()
    assert (description.epoch, description.instance_id) == (row.epoch, row.instance_id) == (1, row.instance_id)


async def test_a_worker_hears_the_settings_and_not_the_secrets(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINSMITH_API_KEY", "tml-secret")
    await only_worker(fleet).connection(START_SECONDS)
    told = seen(tmp_path)
    assert "tml-secret" not in json.dumps(told)
    arguments = told["arguments"]
    assert arguments[arguments.index("--adapter-slots") + 1] == "8"
    assert "--map-stable-reinforce" in arguments
    assert arguments[arguments.index("--volume") + 1].startswith(str(tmp_path / "data" / "workers"))


async def test_a_killed_worker_comes_back_under_a_new_epoch(fleet: LocalFleet, store: SqlStore, tmp_path: Path) -> None:
    worker = only_worker(fleet)
    before = await worker.connection(START_SECONDS)
    os.kill(pid_of(tmp_path), signal.SIGKILL)
    while (after := await worker.connection(START_SECONDS)) is before:
        await asyncio.sleep(0.01)
    assert await after.submit(worker_pb2.SubmitRequest(model_id="m", kind=worker_pb2.CREATE_MODEL)) == 2
    assert (await store.get_worker(worker.worker_id)).epoch == 2
    with pytest.raises(WorkerUnavailable):
        await before.describe()


def pid_of(tmp_path: Path) -> int:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    (pid,) = [pid for pid in children if b"fake_worker_program" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(pid)


async def refused(fleet: LocalFleet, tmp_path: Path, sentence: str) -> Supervisor:
    """The worker, after its model's directory was found to be broken."""
    (tmp_path / "model" / "refuse").write_text(sentence)
    worker = only_worker(fleet)
    with pytest.raises(ModelUnloadable, match=f"^{sentence}$"):
        await worker.connection(START_SECONDS)
    assert worker._life is not None
    await worker._life
    return worker


async def test_a_model_that_cannot_be_loaded_is_tried_again_by_the_next_request_that_needs_it(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.fleet.supervisor.UNLOADABLE_BACKOFF_SECONDS", 0.0)
    worker = await refused(fleet, tmp_path, "model.safetensors is truncated")
    (tmp_path / "model" / "refuse").unlink()
    assert worker.running() is None
    await worker.connection(START_SECONDS)
    assert worker.running() is not None


async def test_requests_within_the_back_off_hear_the_reason_and_start_nothing(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    worker = await refused(fleet, tmp_path, "model.safetensors is truncated")
    (tmp_path / "model" / "refuse").unlink()
    with pytest.raises(ModelUnloadable, match="is truncated"):
        await worker.connection(START_SECONDS)


async def test_a_lost_worker_is_one_line_with_its_reason_once(
    fleet: LocalFleet, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await refused(fleet, tmp_path, "model.safetensors is truncated")
    output = "".join(capfd.readouterr())
    assert output.count("model.safetensors is truncated") == 1
    assert output.count("worker lost") == 1


async def test_closing_the_fleet_lets_workers_end_by_themselves(
    settings: Settings, store: SqlStore, tmp_path: Path
) -> None:
    fleet = LocalFleet(settings)
    await fleet.open(store)
    client = await only_worker(fleet).connection(START_SECONDS)
    await fleet.close()
    assert (tmp_path / "model" / "stopped").exists()
    with pytest.raises(WorkerUnavailable):
        await client.describe()


async def test_one_server_owns_a_data_directory(fleet: LocalFleet, settings: Settings, store: SqlStore) -> None:
    other = LocalFleet(settings)
    with pytest.raises(StartupError, match="another server uses the data directory"):
        await other.open(store)
    await other.close()


async def test_a_worker_that_nobody_serves_is_unavailable_with_the_cure(fleet: LocalFleet) -> None:
    with pytest.raises(WorkerUnavailable, match="add it with --model"):
        fleet.worker("gone-1")


async def test_waiting_for_a_worker_ends_with_the_reason(fleet: LocalFleet) -> None:
    with pytest.raises(WorkerUnavailable, match="the worker is starting"):
        await only_worker(fleet).connection(0)
