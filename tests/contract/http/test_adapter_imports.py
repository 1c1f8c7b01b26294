"""Adapters that come in: uploads by URLs that need no key, and checkpoints that are made of them once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.server.fake_fleet import BASE_MODEL, FakeFleet
from support.server.http_server import TestedServer, one_server, running_server, settings_for
from tinsmith_rpc import worker_pb2

pytestmark = pytest.mark.core

HOUR = 3600
MIB = 2**20
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}


async def start(server: TestedServer, **fields: Any) -> httpx.Response:
    body = {"base_model": BASE_MODEL, "lora_config": {"rank": 4, "train_mlp": False}, **fields}
    return await server.post("/external_weights_upload_start", body)


async def send(server: TestedServer, started: dict[str, Any]) -> None:
    for name, url in started["urls"].items():
        sent = await server.client.put(url, content=FILES[name], headers={"X-API-Key": ""})
        assert sent.status_code == 200, sent.text


async def finish(server: TestedServer, started: dict[str, Any], **options: Any) -> httpx.Response:
    return await server.post("/external_weights_upload_finish", {"upload_id": started["upload_id"]}, **options)


async def uploaded(server: TestedServer) -> dict[str, Any]:
    started: dict[str, Any] = (await start(server)).json()
    await send(server, started)
    return started


async def other_tenant(server: TestedServer) -> dict[str, Any]:
    """Options of its requests."""
    created = await server.services.keys.create("stranger", "laptop")
    return {"headers": {"X-API-Key": created.secret}}


def files_in(server: TestedServer) -> list[str]:
    root = server.services.settings.data / "checkpoints" / "uploads"
    return sorted(path.name for path in root.rglob("*") if path.is_file())


@pytest.mark.core(
    "POST /api/v1/external_weights_upload_start",
    "PUT /api/v1/uploads/{token}/{name}",
    "POST /api/v1/external_weights_upload_finish",
)
async def test_files_that_were_sent_become_a_checkpoint_of_the_tenant(server: TestedServer) -> None:
    started = await uploaded(server)
    assert sorted(started["urls"]) == sorted(FILES)
    assert files_in(server) == sorted(FILES)

    path = (await finish(server, started)).json()["tinker_path"]

    (asked,) = server.worker.imports
    assert (asked.lora.rank, asked.lora.train_mlp, asked.lora.train_attn) == (4, False, True)
    assert path == f"tinker://{asked.model_id}/external_weights/imported"
    assert files_in(server) == []
    (found,) = (await server.client.get("/checkpoints")).json()["checkpoints"]
    assert (found["tinker_path"], found["checkpoint_type"]) == (path, "external")
    info = (await server.post("/weights_info", {"tinker_path": path})).json()
    assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == (BASE_MODEL, 4, False)


async def test_finishing_again_makes_nothing_new(server: TestedServer) -> None:
    started = await uploaded(server)
    paths = {(await finish(server, started)).json()["tinker_path"] for _ in range(3)}
    assert len(paths) == 1
    assert len(server.worker.imports) == 1
    assert (await server.client.get("/checkpoints")).json()["cursor"]["total_count"] == 1


async def test_an_imported_checkpoint_is_loaded_without_an_optimizer_and_sampled_from(server: TestedServer) -> None:
    path = (await finish(server, await uploaded(server))).json()["tinker_path"]
    session = await server.session()
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
    await server.outcome(await server.post("/load_weights", body))
    load = worker_pb2.LoadWeights.FromString(server.worker.payload(f"{session}:train:0", 0))
    assert (load.tinker_path, load.with_optimizer, load.create) == (path, False, True)
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    assert (await server.post("/create_sampling_session", body)).status_code == 200


async def test_another_tenant_sees_neither_the_upload_nor_its_checkpoint(server: TestedServer) -> None:
    started, stranger = await uploaded(server), await other_tenant(server)
    assert (await finish(server, started, **stranger)).status_code == 404
    assert server.worker.imports == []
    path = (await finish(server, started)).json()["tinker_path"]
    assert (await finish(server, started, **stranger)).status_code == 404
    assert (await server.post("/weights_info", {"tinker_path": path}, **stranger)).status_code == 404


@one_server
async def test_an_upload_that_the_worker_refuses_returns_its_reason_and_can_be_corrected(server: TestedServer) -> None:
    started = await uploaded(server)
    server.worker.import_failure = (grpc.StatusCode.INVALID_ARGUMENT, "adapter_config.json says rank 3")
    refused = await finish(server, started)
    assert (refused.status_code, refused.json()["detail"]) == (422, "adapter_config.json says rank 3")
    assert (await server.client.get("/checkpoints")).json()["checkpoints"] == []
    server.worker.import_failure = None
    await send(server, started)
    assert (await finish(server, started)).status_code == 200


@one_server
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_model": "none/such"}, "does not serve the base model 'none/such'"),
        ({"lora_config": {"rank": 0}}, "lora_config.rank"),
        ({"lora_config": {}, "base_model": 7}, "base_model"),
    ],
)
async def test_a_start_that_cannot_work_is_refused(server: TestedServer, fields: dict[str, Any], message: str) -> None:
    refused = await start(server, **fields)
    assert refused.status_code == 422
    assert message in refused.json()["detail"]


async def test_a_link_ends_and_its_files_go_with_it(server: TestedServer) -> None:
    started, kept = await uploaded(server), files_in(server)
    await server.services.background.sweep_now()
    assert files_in(server) == kept
    server.time.pass_seconds(HOUR + 1)
    await server.services.background.sweep_now()
    assert files_in(server) == []
    assert (await server.client.put(started["urls"]["adapter_config.json"], content=b"{}")).status_code == 404
    assert (await finish(server, started)).status_code == 404


async def test_a_file_over_the_limit_is_refused_and_leaves_nothing(tmp_path: Path, fleet: FakeFleet) -> None:
    async def parts() -> Any:
        for _ in range(2):
            yield bytes(MIB)

    async with running_server(settings_for(tmp_path, max_upload_bytes=MIB), fleet) as server:
        url = (await start(server)).json()["urls"]["adapter_model.safetensors"]
        for content in (bytes(MIB + 1), parts()):
            refused = await server.client.put(url, content=content)
            assert refused.status_code == 413
            assert f"over the limit of {MIB} bytes" in refused.json()["detail"]
            assert files_in(server) == []
        assert (await server.client.put(url, content=bytes(MIB))).status_code == 200
        assert files_in(server) == ["adapter_model.safetensors"]


async def test_a_tenant_has_so_many_uploads_under_way(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path, uploads_per_tenant=1), fleet) as server:
        first, second = await uploaded(server), (await start(server)).json()
        refused = await server.client.put(second["urls"]["adapter_config.json"], content=b"{}")
        assert refused.status_code == 422
        assert "setting uploads_per_tenant" in refused.json()["detail"]
        await finish(server, first)
        await send(server, second)


@one_server
async def test_a_finished_and_deleted_import_does_not_reappear_and_leaves_nothing(server: TestedServer) -> None:
    started = await uploaded(server)
    path = (await finish(server, started)).json()["tinker_path"]
    run, _, name = path.removeprefix("tinker://").split("/")
    assert (await server.client.delete(f"/training_runs/{run}/checkpoints/external_weights/{name}")).status_code < 300
    await send(server, started)
    again = await finish(server, started)
    assert (again.status_code, "start another upload" in again.json()["detail"]) == (404, True)
    assert files_in(server) == []


def imported(server: TestedServer) -> list[Path]:
    """Directories of checkpoints that a worker has made of uploads."""
    return sorted((server.checkpoints / "external_weights").glob("*/*"))


async def test_the_remains_of_an_import_of_a_killed_server_are_removed_within_a_day(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = await uploaded(server)

    async def die(*_named: object, **_named_too: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr("tinsmith_server.services.training.adapter_imports.add_ended_run", die)
    with pytest.raises(asyncio.CancelledError):
        await finish(server, started)
    assert len(imported(server)) == 1
    await server.services.background.sweep_now()
    assert len(imported(server)) == 1
    server.time.pass_seconds(24 * HOUR + 1)
    await server.services.background.sweep_now()
    assert imported(server) == []


async def test_an_import_that_a_repeated_finish_completes_is_kept(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = await uploaded(server)

    async def die(*_named: object, **_named_too: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as killed:
        killed.setattr("tinsmith_server.services.training.adapter_imports.add_ended_run", die)
        with pytest.raises(asyncio.CancelledError):
            await finish(server, started)
    assert (await finish(server, started)).status_code == 200
    server.time.pass_seconds(24 * HOUR + 1)
    await server.services.background.sweep_now()
    assert imported(server)


@one_server
async def test_a_file_of_an_upload_has_one_sender_at_a_time(server: TestedServer) -> None:
    started = (await start(server)).json()
    url = started["urls"]["adapter_model.safetensors"]
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"wei"
        begun.set()
        await go_on.wait()
        yield b"ghts"

    first = asyncio.create_task(server.client.put(url, content=slowly()))
    await begun.wait()
    second = await server.client.put(url, content=b"weights")
    go_on.set()
    assert (second.status_code, "being sent already" in second.json()["detail"]) == (422, True)
    assert (await first).status_code == 200


@one_server
@pytest.mark.parametrize("name", ["pytorch_model.bin", "..%2F..%2Ftinsmith.db", "manifest.json", ".part-1"])
async def test_a_link_takes_the_files_of_an_adapter_alone(server: TestedServer, name: str) -> None:
    started = (await start(server)).json()
    url = started["urls"]["adapter_config.json"].replace("adapter_config.json", name)
    assert (await server.client.put(url, content=b"{}")).status_code == 404
    assert (await server.client.put(url.replace("/uploads/", "/uploads/x"), content=b"{}")).status_code == 404
    assert files_in(server) == []


async def test_imports_count_against_the_storage_of_a_tenant(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path, checkpoint_bytes_per_tenant=1), fleet) as server:
        started = [(await start(server)).json() for _ in range(2)]
        for each in started:
            await send(server, each)
        assert (await finish(server, started[0])).status_code == 200
        refused = [await finish(server, started[1]), await start(server)]
        assert [each.status_code for each in refused] == [422, 422]
        assert all("setting checkpoint_bytes_per_tenant" in each.json()["detail"] for each in refused)
