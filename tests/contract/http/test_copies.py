"""Copies of checkpoints: of one's own, of public ones, and of another tenant's by its key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import TestedServer, running_server, running_servers, settings_for
from tinsmith_server.services.checkpoints.files import CheckpointFiles
from tinsmith_server.store.connection import StoreUnavailable
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core

HOUR = 3600


async def saved(server: TestedServer, name: str = "ck") -> str:
    """Save a training checkpoint, and return its path."""
    path: str = (await server.outcome(await server.save(await server.model(), 1, name)))["path"]
    return path


def content_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def kept(server: TestedServer) -> list[Path]:
    """Directories of copies: the worker's own are elsewhere."""
    return sorted((server.checkpoints / "weights" / "copies").glob("*"))


async def copied(server: TestedServer, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return await server.post("/copy_weights", {"source_path": path, **body}, headers=headers)


async def other_tenants_key(server: TestedServer) -> str:
    return (await server.services.keys.create("stranger", "laptop")).secret


async def test_a_copy_outlives_its_source(server: TestedServer) -> None:
    source = await saved(server)
    files = content_of(server.newest_directory)
    run = source.split("/")[2]
    path = (await copied(server, source, destination_project_id="there", ttl_seconds=HOUR)).json()["tinker_path"]
    assert path.endswith("/weights/ck")
    assert path != source
    (await server.client.delete(f"/training_runs/{run}/checkpoints/weights/ck")).raise_for_status()
    (found,) = (await server.client.get("/checkpoints")).json()["checkpoints"]
    assert (found["tinker_path"], found["public"], "expires_at" in found) == (path, False, True)
    (directory,) = kept(server)
    assert content_of(directory) == files
    runs = (await server.client.get("/training_runs", params={"project_id": "there"})).json()["training_runs"]
    assert [one["training_run_id"] for one in runs] == [path.split("/")[2]]


@pytest.mark.core("POST /api/v1/copy_weights")
async def test_a_request_that_is_repeated_makes_one_copy(server: TestedServer) -> None:
    source = await saved(server)
    headers = {"X-Idempotency-Key": "once"}
    first, second = [(await copied(server, source, headers)).json()["tinker_path"] for _ in range(2)]
    assert first == second
    assert len(kept(server)) == 1
    assert (await copied(server, source)).json()["tinker_path"] != first


async def test_a_copy_that_was_deleted_is_not_made_again_by_its_old_request(server: TestedServer) -> None:
    """Its files would stay without an owner, and count for no tenant."""
    source = await saved(server)
    headers = {"X-Idempotency-Key": "once"}
    run = (await copied(server, source, headers)).json()["tinker_path"].split("/")[2]
    (await server.client.delete(f"/training_runs/{run}/checkpoints/weights/ck")).raise_for_status()
    again = await copied(server, source, headers)
    assert (again.status_code, "was deleted" in again.json()["detail"]) == (404, True)
    assert kept(server) == []


async def test_a_copy_keeps_its_files_when_the_store_fails_after_the_commit(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that restarts after the commit: the repeated request answers with a checkpoint that is whole."""
    source, headers = await saved(server), {"X-Idempotency-Key": "once"}
    files, put = content_of(server.newest_directory), Store.put_checkpoint

    async def put_and_fail(self: Store, *arguments: Any) -> None:
        await put(self, *arguments)
        raise StoreUnavailable("the connection is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_checkpoint", put_and_fail)
        assert (await copied(server, source, headers)).status_code >= 500
    assert (await copied(server, source, headers)).status_code == 200
    (directory,) = kept(server)
    assert content_of(directory) == files


async def test_another_tenants_weights_are_copied_with_its_key_alone(server: TestedServer) -> None:
    source = await saved(server)
    own = server.client.headers["X-API-Key"]
    stranger = {"X-API-Key": await other_tenants_key(server)}
    assert (await copied(server, source, stranger)).status_code == 404
    forged = {**stranger, "X-Tinker-Weights-Access-Token": "tml-forged"}
    refused = await copied(server, source, forged)
    assert (refused.status_code, "weights_access_token" in refused.json()["detail"]) == (404, True)
    path = (await copied(server, source, {**stranger, "X-Tinker-Weights-Access-Token": own})).json()["tinker_path"]
    of_stranger = (await server.client.get("/checkpoints", headers=stranger)).json()["checkpoints"]
    assert [one["tinker_path"] for one in of_stranger] == [path]
    assert len((await server.client.get("/checkpoints")).json()["checkpoints"]) == 1


async def test_a_model_starts_from_another_tenants_weights_with_its_key_alone(server: TestedServer) -> None:
    source = await saved(server)
    own = server.client.headers["X-API-Key"]
    stranger = {"X-API-Key": await other_tenants_key(server)}
    asked = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
    session = (await server.post("/create_session", asked, headers=stranger)).json()["session_id"]
    outcomes = []
    for number, token in enumerate((None, own)):
        body = {"session_id": session, "model_seq_id": number, "path": source, "optimizer": False}
        body |= {"weights_access_token": token} if token else {}
        made = (await server.post("/load_weights", body, headers=stranger)).json()
        outcomes.append(
            (await server.post("/retrieve_future", {"request_id": made["request_id"]}, headers=stranger)).json()
        )
    assert f"there is no checkpoint {source}" in outcomes[0]["error"]
    assert outcomes[1].get("error") is None


async def test_copies_that_are_asked_for_at_once_hold_no_more_than_one_after_the_other(
    tmp_path: Path, fleet: FakeFleet
) -> None:
    async with running_server(settings_for(tmp_path), fleet) as server:
        source = await saved(server)
        (held,) = (await server.client.get("/checkpoints")).json()["checkpoints"]
    settings = settings_for(tmp_path, checkpoint_bytes_per_tenant=3 * held["size_bytes"])
    async with running_server(settings, fleet) as server:
        answers = await asyncio.gather(*(copied(server, source) for _ in range(6)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 422, 422, 422, 422]


@pytest.mark.parametrize("place", [{"session_id": "sess-1"}, {"model_seq_id": 0}])
async def test_a_place_in_a_session_is_refused_with_a_message(server: TestedServer, place: dict[str, Any]) -> None:
    assert (await copied(server, await saved(server), **place)).status_code == 422


@pytest.mark.parametrize("change", [{"ttl_seconds": HOUR}, {"destination_project_id": "there"}])
async def test_a_key_that_returns_with_another_request_is_refused_and_makes_nothing(
    server: TestedServer, change: dict[str, Any]
) -> None:
    source, key = await saved(server), {"X-Idempotency-Key": "once"}
    path = (await copied(server, source, key)).json()["tinker_path"]
    for refused in (await copied(server, source, key, **change), await copied(server, await saved(server), key)):
        assert (refused.status_code, "was used for another request" in refused.json()["detail"]) == (422, True)
    assert len(kept(server)) == 1
    assert (await copied(server, source, key)).json()["tinker_path"] == path


async def test_a_loser_of_two_attempts_removes_its_own_files_alone(
    tmp_path: Path, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is deleted while a second server copies: the finished copy of the first one stays whole."""
    async with running_servers(settings_for(tmp_path), fleet) as (first, second):
        source, key = await saved(first), {"X-Idempotency-Key": "once"}
        directory, made = first.newest_directory, CheckpointFiles.copy

        def slow(self: CheckpointFiles, *named: Any) -> None:
            if self is second.services._files:
                answer = asyncio.run_coroutine_threadsafe(copied(first, source, key), loop).result()
                assert answer.status_code == 200
                for file in directory.iterdir():
                    file.unlink()
            made(self, *named)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(CheckpointFiles, "copy", slow)
        assert (await copied(second, source, key)).status_code == 404
        (kept_copy,) = kept(first)
        assert set(content_of(kept_copy)) == {*first.worker.saved_files, "manifest.json"}


async def test_the_remains_of_a_copy_of_a_killed_server_are_removed_within_a_day(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await saved(server)

    async def die(*_named: object, **_named_too: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as killed:
        killed.setattr("tinsmith_server.services.checkpoints.copies.add_ended_run", die)
        with pytest.raises(asyncio.CancelledError):
            await copied(server, source, {"X-Idempotency-Key": "once"})
    assert len(kept(server)) == 1
    path = (await copied(server, source, {"X-Idempotency-Key": "once"})).json()["tinker_path"]
    server.time.pass_seconds(24 * HOUR + 1)
    await server.services.background.sweep_now()
    (directory,) = kept(server)
    assert set(content_of(directory)) == {*server.worker.saved_files, "manifest.json"}
    listed = (await server.client.get("/checkpoints")).json()["checkpoints"]
    assert sorted(one["tinker_path"] for one in listed) == sorted([source, path])


@pytest.mark.parametrize("file", ["adapter_config.json", "manifest.json"])
async def test_a_checkpoint_that_is_not_as_it_was_saved_is_not_copied(server: TestedServer, file: str) -> None:
    source = await saved(server)
    changed = server.newest_directory / file
    changed.unlink()
    changed.write_bytes(b"{} ")
    refused = await copied(server, source)
    assert (refused.status_code, "use another checkpoint" in refused.json()["detail"]) == (422, True)
    assert kept(server) == []


async def test_idempotency_keys_of_tenants_are_separate(server: TestedServer) -> None:
    own, key = server.client.headers["X-API-Key"], {"X-Idempotency-Key": "once"}
    first = (await copied(server, await saved(server), key)).json()["tinker_path"]
    stranger = {**key, "X-API-Key": await other_tenants_key(server), "X-Tinker-Weights-Access-Token": own}
    second = await copied(server, await saved(server), stranger)
    assert (second.status_code, second.json()["tinker_path"] == first) == (200, False)
