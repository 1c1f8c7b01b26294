"""The local fleet: child processes that load models at start, come back by themselves, and end with the server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server.fleet_under_test import START_SECONDS, worker_pid, worker_pids
from support.server.operator_stand_in import MODEL
from tinsmith_server.errors import StartupError, WorkerUnavailable, WorkerUnstartable
from tinsmith_server.fleet.local.fleet import LocalFleet
from tinsmith_server.fleet.local.supervisor import SamplerSupervisor, Supervisor
from tinsmith_server.services.sampling.adapter_delivery import SaveSources
from tinsmith_server.services.sampling.dispatch import Dispatch
from tinsmith_server.services.sampling.routing import SamplerLoads
from tinsmith_server.settings import Settings
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import SampleId, sampler_token


def only_worker(fleet: LocalFleet) -> Supervisor:
    (worker,) = fleet.workers
    assert isinstance(worker, Supervisor)
    return worker


def seen(tmp_path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tmp_path / "model" / "seen.json").read_text())
    return content


async def test_names_that_share_a_directory_share_a_process_started_at_first_use(local_fleet: LocalFleet) -> None:
    worker = only_worker(local_fleet)
    assert worker.running() is None
    assert [*local_fleet.trainers(MODEL, 8), *local_fleet.trainers("b", 8)] == [worker, worker]
    await worker.connection(START_SECONDS)
    assert worker_pid()


async def test_each_device_has_a_worker_process_that_sees_it_alone(settings: Settings, store: Store) -> None:
    fleet = LocalFleet(settings.model_copy(update={"devices": ("3", "cpu")}))
    await fleet.open(store)
    workers = fleet.trainers(MODEL, 8)
    assert [*workers] == [*fleet.trainers("b", 8)] == [*fleet.samplers("b")] == [*fleet.workers]
    devices = {}
    for worker in workers:
        assert isinstance(worker, Supervisor)
        await worker.connection(START_SECONDS)
        [pid] = set(worker_pids()) - devices.keys()
        devices[pid] = variable_of(pid, "CUDA_VISIBLE_DEVICES")
    assert list(devices.values()) == ["3", ""]
    assert len({worker.worker_id for worker in workers}) == 2
    await fleet.close()


def variable_of(pid: int, name: str) -> str | None:
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(one.split("=", maxsplit=1) for one in environment if "=" in one).get(name)


async def test_no_sampler_is_started_to_cancel_a_sample(settings_with_sampler: Settings, store: Store) -> None:
    """It was given by an earlier server, whose samplers ended with it."""
    fleet = LocalFleet(settings_with_sampler)
    await fleet.open(store)
    (sampler,) = fleet.all_samplers
    dispatch = Dispatch(fleet, SamplerLoads(), SaveSources(fleet, streams=False))
    await dispatch.cancel(SampleId("sess-1:sample:0", 0, sampler_token(sampler.sampler_id)))
    assert isinstance(sampler, SamplerSupervisor)
    assert (sampler._life, only_worker(fleet)._life) == (None, None)
    await fleet.close()


async def refused(fleet: LocalFleet, tmp_path: Path, sentence: str) -> Supervisor:
    """Return the worker, after its model's directory was found to be broken."""
    (tmp_path / "model" / "refuse").write_text(sentence)
    worker = only_worker(fleet)
    with pytest.raises(WorkerUnstartable, match=f"^{sentence}$"):
        await worker.connection(START_SECONDS)
    assert worker._life is not None
    await worker._life
    return worker


async def test_a_model_that_cannot_be_loaded_is_tried_again_by_the_next_request_that_needs_it(
    local_fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.fleet.local.supervisor.MENDING_BACKOFF_SECONDS", 0.0)
    worker = await refused(local_fleet, tmp_path, "model.safetensors is truncated")
    (tmp_path / "model" / "refuse").unlink()
    assert worker.running() is None
    await worker.connection(START_SECONDS)
    assert worker.running() is not None


async def test_a_worker_that_ends_at_its_flags_is_not_tried_again(
    local_fleet: LocalFleet, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its flags were fine when the server started: the worker's program has changed since."""
    (tmp_path / "model" / "contradict").touch()
    worker = only_worker(local_fleet)
    for _ in range(2):
        with pytest.raises(WorkerUnstartable, match=r"^the flags contradict each other$"):
            await worker.connection(START_SECONDS)
    assert "".join(capfd.readouterr()).count("worker lost") == 1


async def test_a_lost_worker_is_one_line_with_its_reason_once(
    local_fleet: LocalFleet, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await refused(local_fleet, tmp_path, "model.safetensors is truncated")
    output = "".join(capfd.readouterr())
    assert output.count("model.safetensors is truncated") == 1
    assert output.count("worker lost") == 1


async def test_an_idle_worker_stops_and_the_next_request_starts_it(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "model" / "idle").write_text("5")
    fleet = LocalFleet(settings.model_copy(update={"suspend_after_seconds": 1.0}))
    await fleet.open(store)
    worker = only_worker(fleet)
    await worker.connection(START_SECONDS)
    await until_no_process_runs()
    assert worker.asleep
    assert f"waking {MODEL}: no client had used it for 1 s" in str(worker.unavailable_reason)
    (tmp_path / "model" / "idle").unlink()
    await worker.connection(START_SECONDS)
    assert (worker.asleep, len(worker_pids())) == (False, 1)
    await fleet.close()


async def test_a_sampler_that_was_idle_starts_after_its_worker_has_loaded_again(
    settings_with_sampler: Settings, store: Store, tmp_path: Path
) -> None:
    """On one GPU, what a worker takes later would not fit next to the sampler."""
    (tmp_path / "model" / "idle").write_text("5")
    fleet = LocalFleet(settings_with_sampler.model_copy(update={"suspend_after_seconds": 1.0}))
    await fleet.open(store)
    (sampler,) = fleet.all_samplers
    await sampler.connection(START_SECONDS)
    await only_worker(fleet).connection(START_SECONDS)
    await until_no_process_runs()
    (tmp_path / "model" / "idle").unlink()
    await sampler.connection(START_SECONDS)
    assert only_worker(fleet).running() is not None
    await fleet.close()


async def until_no_process_runs() -> None:
    async with asyncio.timeout(START_SECONDS):
        while worker_pids():
            await asyncio.sleep(0.02)


async def test_one_server_owns_a_data_directory(local_fleet: LocalFleet, settings: Settings, store: Store) -> None:
    other = LocalFleet(settings)
    with pytest.raises(StartupError, match="another server uses the data directory"):
        await other.open(store)
    await other.close()


async def test_waiting_for_a_worker_ends_with_the_reason(local_fleet: LocalFleet) -> None:
    worker = only_worker(local_fleet)
    with pytest.raises(WorkerUnavailable, match=f"^loading base model {MODEL}, 0 s so far$"):
        await worker.connection(0)
    assert worker.unavailable_reason == f"loading base model {MODEL}, 0 s so far"
    assert await local_fleet.provide(MODEL) == worker.unavailable_reason, "it has not said yet how many models it takes"
    await worker.connection(START_SECONDS)
    assert worker.unavailable_reason is None


async def preloaded(settings: Settings, store: Store) -> tuple[LocalFleet, list[str]]:
    """Return a fleet that has loaded its models, or given up, and its messages meanwhile."""
    told: list[str] = []
    fleet = LocalFleet(settings.model_copy(update={"preload_models": True}), told.append)
    await fleet.open(store)
    await asyncio.gather(*fleet._preloading)
    return fleet, told


async def test_models_are_loaded_before_the_first_request_and_the_progress_is_reported(
    settings: Settings, store: Store
) -> None:
    fleet, told = await preloaded(settings, store)
    assert only_worker(fleet).running() is not None
    assert told[0] == f"loading base model {MODEL}"
    assert re.fullmatch(f"{MODEL} is ready after [0-9]+ s", told[-1])
    await fleet.close()


async def test_a_model_loads_before_there_is_a_store_and_is_ready_once_there_is(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    fleet = LocalFleet(settings.model_copy(update={"preload_models": True}))
    await fleet.begin()
    while not (tmp_path / "model" / "seen.json").exists():
        await asyncio.sleep(0.02)
    worker = only_worker(fleet)
    with pytest.raises(WorkerUnavailable, match="loading base model"):
        await worker.connection(0)
    loading = worker_pid()

    await fleet.open(store)
    await worker.connection(START_SECONDS)
    assert worker_pid() == loading
    await fleet.close()


async def test_a_sampler_for_a_worker_starts_before_the_first_request_and_ends_with_the_server(
    settings_with_sampler: Settings, store: Store
) -> None:
    fleet, told = await preloaded(settings_with_sampler, store)
    (sampler,) = fleet.all_samplers
    assert [*fleet.samplers(MODEL, 8), *fleet.samplers("b")] == [sampler, sampler]
    assert (sampler.kind, sampler.base_model) == ("pool", MODEL)
    assert sampler.sampler_id != only_worker(fleet).worker_id
    assert f"starting vllm with {MODEL}" in told
    assert any(re.fullmatch(f"{MODEL} in vllm is ready after [0-9]+ s", line) for line in told)
    running = [sampler.running(), only_worker(fleet).running()]
    await fleet.close()
    for client in running:
        assert client is not None
        with pytest.raises(WorkerUnavailable):
            await client.describe()


async def test_a_sampler_starts_when_its_worker_has_loaded_the_model(
    settings_with_sampler: Settings, store: Store, tmp_path: Path
) -> None:
    """On one GPU, what a worker takes meanwhile would count as the sampler's own."""
    fleet = LocalFleet(settings_with_sampler.model_copy(update={"preload_models": True}))
    await fleet.begin()
    while not (tmp_path / "model" / "seen.json").exists():
        await asyncio.sleep(0.02)
    (sampler,) = fleet.all_samplers
    with pytest.raises(WorkerUnavailable, match=f"^starting vllm with {MODEL}, "):
        await sampler.connection(0.5)
    assert worker_pid(), "it is the only one: without a store no worker is ready"
    await fleet.open(store)
    await sampler.connection(START_SECONDS)
    await fleet.close()


async def test_a_sampler_that_cannot_start_is_a_sentence_and_the_worker_trains_all_the_same(
    settings_with_sampler: Settings, store: Store, tmp_path: Path
) -> None:
    fleet = LocalFleet(settings_with_sampler)
    await fleet.open(store)
    await only_worker(fleet).connection(START_SECONDS)
    (tmp_path / "model" / "refuse").write_text("vLLM ended with status 1. Its last words: CUDA error")
    (sampler,) = fleet.all_samplers
    with pytest.raises(WorkerUnstartable, match=r"^vLLM ended with status 1\. "):
        await sampler.connection(START_SECONDS)
    assert only_worker(fleet).running() is not None
    await fleet.close()


KILLED = """
import asyncio, os, sys
from pathlib import Path
from tinsmith_server.fleet.local.fleet import LocalFleet
from tinsmith_server.settings import Settings

async def open_and_die():
    await LocalFleet(Settings(data=Path(sys.argv[1]))).open(None)
    os._exit(9)

asyncio.run(open_and_die())
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of temporary files, with a short path, which leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


async def test_temporary_files_of_a_killed_server_are_removed_when_the_next_one_starts_on_its_data(
    temporary: Path, tmp_path: Path, store: Store
) -> None:
    """A server on other data may be alive, and keeps its files."""
    left = {data: left_by_killed(tmp_path / data, temporary) for data in ("data", "other")}
    assert {folder.name for folder in temporary.iterdir()} == set(left.values())

    next_one = LocalFleet(Settings(data=tmp_path / "data"))
    await next_one.open(store)
    assert left["data"] not in {folder.name for folder in temporary.iterdir()}
    await next_one.close()
    assert [folder.name for folder in temporary.iterdir()] == [left["other"]]


def left_by_killed(data: Path, temporary: Path) -> str:
    """Return the folder that the killed server made."""
    before = set(temporary.iterdir())
    environment = {**os.environ, "TMPDIR": str(temporary)}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(data)], env=environment, check=False)
    assert killed.returncode == 9
    [folder] = set(temporary.iterdir()) - before
    return folder.name
