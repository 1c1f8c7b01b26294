"""Saves and what can be done with them: names, listing, deleting, publishing, expiring, downloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import TestedServer, running_server, settings_for
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import CheckpointRootUnavailable
from tinsmith_server.services.checkpoints.files import CheckpointFiles

pytestmark = pytest.mark.core

HOUR = 3600


async def checkpoints(server: TestedServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await server.client.get("/checkpoints")).json()["checkpoints"]
    return found


async def links(server: TestedServer, model_id: str) -> dict[str, str]:
    """Download URLs of the export `ex` by file."""
    path = f"/training_runs/{model_id}/checkpoints/external_weights/ex/external_weights_urls"
    urls: dict[str, str] = (await server.client.get(path)).json()["urls"]
    return urls


async def save_external(server: TestedServer, model_id: str, seq_id: int, name: str) -> Path:
    """Save an export, and return the folder of its files."""
    body = {"model_id": model_id, "seq_id": seq_id, "path": name}
    await server.outcome(await server.post("/save_weights_external", body))
    return server.newest_directory


@pytest.mark.core("GET /api/v1/training_runs/{run_id}", "POST /api/v1/save_weights")
async def test_a_client_can_list_a_save_as_soon_as_it_has_the_result(server: TestedServer) -> None:
    model_id = await server.model()
    fields = {"ttl_seconds": HOUR, "user_metadata": {"step": "7"}}
    path = (await server.outcome(await server.save(model_id, 1, "ck", **fields)))["path"]
    (found,) = await checkpoints(server)
    assert (found["tinker_path"], found["checkpoint_id"]) == (path, "weights/ck")
    assert (found["checkpoint_type"], found["user_metadata"], found["public"]) == ("training", {"step": "7"}, False)
    assert found["time"].endswith("Z")
    assert found["expires_at"].endswith("Z")
    run = (await server.client.get(f"/training_runs/{model_id}")).json()
    assert run["last_checkpoint"] == found
    assert "last_sampler_checkpoint" not in run


async def test_the_worker_hears_how_far_the_server_had_seen(server: TestedServer) -> None:
    model_id = await server.model()
    for seq_id in (1, 2):
        await server.outcome(await server.save(model_id, seq_id, f"ck{seq_id}"))
    save = worker_pb2.SaveWeights.FromString(server.worker.payload(model_id, 2))
    assert (save.name_taken, save.seen_event_id) == (False, 1)


@pytest.mark.parametrize("ttl_seconds", [3599, 10 * 365 * 24 * HOUR + 1, "1h"])
async def test_a_ttl_outside_an_hour_and_ten_years_is_refused(server: TestedServer, ttl_seconds: object) -> None:
    model_id = await server.model()
    assert (await server.outcome(await server.save(model_id, 1, "a", ttl_seconds=ttl_seconds)))["category"] == "user"
    await server.outcome(await server.save(model_id, 2, "b"))
    ttl = f"/training_runs/{model_id}/checkpoints/weights/b/ttl"
    assert (await server.client.put(ttl, json={"ttl_seconds": ttl_seconds})).status_code == 422


async def test_an_expired_checkpoint_is_not_there_and_its_name_is_free(server: TestedServer) -> None:
    model_id = await server.model()
    path = (await server.outcome(await server.save(model_id, 1, "ck", ttl_seconds=HOUR)))["path"]
    server.time.pass_seconds(HOUR + 60)
    assert await checkpoints(server) == []
    assert (await server.post("/weights_info", {"tinker_path": path})).status_code == 404
    assert "path" in await server.outcome(await server.save(model_id, 2, "ck"))


@pytest.mark.core("PUT /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl")
async def test_removing_the_ttl_keeps_a_checkpoint(server: TestedServer) -> None:
    model_id = await server.model()
    await server.outcome(await server.save(model_id, 1, "ck", ttl_seconds=HOUR))
    ttl = f"/training_runs/{model_id}/checkpoints/weights/ck/ttl"
    assert (await server.client.put(ttl, json={"ttl_seconds": None})).status_code == 200
    server.time.pass_seconds(2 * HOUR)
    assert len(await checkpoints(server)) == 1


@pytest.mark.core("DELETE /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}")
async def test_deleting_a_checkpoint_removes_its_files_after_its_record(server: TestedServer) -> None:
    model_id = await server.model()
    directory = await save_external(server, model_id, 1, "ex")
    url = f"/training_runs/{model_id}/checkpoints/external_weights/ex"
    assert (await server.client.delete(url)).status_code == 200
    assert not directory.exists()
    assert (await server.client.delete(url)).status_code == 404


async def test_an_export_is_downloaded_by_plain_links_without_a_key(server: TestedServer) -> None:
    model_id = await server.model()
    await save_external(server, model_id, 1, "ex")
    urls = await links(server, model_id)
    assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
    response = await server.client.get(urls["adapter_model.safetensors"], headers={"X-API-Key": ""})
    assert (response.content, response.headers["content-length"]) == (b"weights", "7")


async def test_a_download_link_ends_when_its_time_is_over(server: TestedServer) -> None:
    model_id = await server.model()
    await save_external(server, model_id, 1, "ex")
    urls = await links(server, model_id)
    server.time.pass_seconds(HOUR + 1)
    assert (await server.client.get(urls["adapter_config.json"])).status_code == 404


@pytest.mark.parametrize("path", ["../../tinsmith.db", "manifest.json", "none", "../ex/adapter_config.json"])
async def test_a_download_link_opens_only_the_exported_archive(server: TestedServer, path: str) -> None:
    model_id = await server.model()
    await save_external(server, model_id, 1, "ex")
    urls = await links(server, model_id)
    token = urlsplit(urls["adapter_config.json"]).path.split("/")[-2]
    assert (await server.client.get(f"/downloads/{token}/{path.replace('/', '%2F')}")).status_code == 404
    assert (await server.client.get(f"/downloads/{token}x/adapter_config.json")).status_code == 404


@pytest.mark.core("POST /api/v1/weights_info")
async def test_weights_info_describes_a_checkpoint(server: TestedServer) -> None:
    path = (await server.outcome(await server.save(await server.model(), 1, "ck")))["path"]
    assert (await server.post("/weights_info", {"tinker_path": path})).json() == {
        "base_model": "org/tiny",
        "is_lora": True,
        "lora_rank": 8,
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
        "optimizer_config": {"type": "adamw"},
    }


@pytest.mark.core("GET /api/v1/checkpoints", "GET /api/v1/training_runs")
async def test_lists_come_in_pages_newest_first(server: TestedServer) -> None:
    model_id = await server.model()
    for seq_id in range(1, 6):
        await server.outcome(await server.save(model_id, seq_id, f"ck{seq_id}"))
    page = (await server.client.get("/checkpoints", params={"limit": 2, "offset": 1})).json()
    assert [one["checkpoint_id"] for one in page["checkpoints"]] == ["weights/ck4", "weights/ck3"]
    assert page["cursor"] == {"offset": 1, "limit": 2, "total_count": 5}
    runs = (await server.client.get("/training_runs")).json()
    assert runs["cursor"]["total_count"] == 1
    assert runs["training_runs"][0]["last_checkpoint"]["checkpoint_id"] == "weights/ck5"


async def test_training_runs_can_be_asked_for_by_project(server: TestedServer) -> None:
    made = {}
    for project in ("wanted", "other", None):
        asked = {"tags": [], "user_metadata": {}, "sdk_version": "0", "project_id": project}
        session_id = (await server.post("/create_session", asked)).json()["session_id"]
        made[project] = (await server.create_model(session_id)).json()["model_id"]

    async def listed(**params: str) -> tuple[set[str], int]:
        runs = (await server.client.get("/training_runs", params=params)).json()
        return {run["training_run_id"] for run in runs["training_runs"]}, runs["cursor"]["total_count"]

    assert await listed(project_id="wanted") == ({made["wanted"]}, 1)
    assert await listed(project_id="unknown") == (set(), 0)
    assert await listed() == (set(made.values()), 3)


async def test_an_export_for_too_many_recipients_is_refused_through_the_future(server: TestedServer) -> None:
    body = {"model_id": await server.model(), "seq_id": 1, "path": "ex", "age_encryption_recipients": ["age1x"] * 11}
    failed = await server.outcome(await server.post("/save_weights_external", body))
    assert (failed["category"], "at most 10 items" in failed["error"]) == ("user", True)


async def test_a_program_that_saves_often_leaves_another_its_current_weights(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path, ephemeral_per_tenant=2), fleet) as server:
        slow, busy = await server.model(), await server.model()
        current = await save_unnamed(server, slow, 0)
        for number in range(5):
            newest = await save_unnamed(server, busy, number)
        assert [(await server.sample(session_id)).status_code for session_id in (current, newest)] == [200, 200]


async def save_unnamed(server: TestedServer, model_id: str, number: int) -> str:
    """Save unnamed weights, and return their sampling session."""
    body = {"model_id": model_id, "seq_id": number + 1, "sampling_session_seq_id": number}
    saved = await server.outcome(await server.post("/save_weights_for_sampler", body))
    return str(saved["sampling_session_id"])


async def test_unnamed_weights_outlive_their_session_by_an_hour(server: TestedServer) -> None:
    model_id = await server.model()
    body = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0}
    await server.outcome(await server.post("/save_weights_for_sampler", body))
    directory = server.newest_directory
    await server.post(f"/sessions/{model_id.split(':', maxsplit=1)[0]}/finish", {"reason": {"type": "success"}})
    server.time.pass_seconds(HOUR - 60)
    await server.services.background.sweep_now()
    assert directory.exists()
    server.time.pass_seconds(120)
    await server.services.background.sweep_now()
    assert not directory.exists()


async def test_files_that_cannot_be_removed_now_are_removed_later(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record goes with the delete: nothing may find a checkpoint whose files are half gone."""
    model_id = await server.model()
    directories = [await save_external(server, model_id, seq_id, f"ex{seq_id}") for seq_id in (1, 2)]
    asked: list[str] = []

    def fail(files: CheckpointFiles, directory: str) -> None:
        asked.append(directory)
        raise CheckpointRootUnavailable("the bucket is away")

    with monkeypatch.context() as away:
        away.setattr(CheckpointFiles, "remove", fail)
        for seq_id in (1, 2):
            path = f"/training_runs/{model_id}/checkpoints/external_weights/ex{seq_id}"
            assert (await server.client.delete(path)).status_code == 200
    assert await checkpoints(server) == []
    assert len(asked) == 2, "a delete waits for its own files alone"
    assert all(directory.exists() for directory in directories)
    await server.services.background.sweep_now()
    assert not any(directory.exists() for directory in directories)


async def test_a_root_that_cannot_be_reached_is_a_503_that_names_it(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = await server.model()
    await save_external(server, model_id, 1, "ex")

    def fail(files: CheckpointFiles, directory: str) -> None:
        raise CheckpointRootUnavailable("the checkpoint root s3://bucket cannot be used: it is away")

    monkeypatch.setattr(CheckpointFiles, "list", fail)
    path = f"/training_runs/{model_id}/checkpoints/external_weights/ex/external_weights_urls"
    refused = await server.client.get(path)
    assert refused.status_code == 503
    assert "s3://bucket" in refused.json()["detail"]
