"""Checkpoints are found by what is known of them, and by their own tenant alone.

The request and the answer are those of SDK 0.39, as its API reference describes them. The path is assumed from the
search of sessions, which has the same form. Where this SDK is installed, its own fields are compared.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import tinker
from support.server.http_server import TestedServer

pytestmark = pytest.mark.core

FIELDS_OF_A_REQUEST = {
    *("project_ids", "user_metadata", "checkpoint_type", "owner", "base_models", "limit", "cursor"),
}


async def search(server: TestedServer, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    answer = await server.post("/checkpoints/search", body, headers=headers)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


async def names(server: TestedServer, **body: Any) -> list[str]:
    return [each["checkpoint_id"] for each in (await search(server, **body))["checkpoints"]]


async def save(server: TestedServer, model_id: str, number: int, name: str, **fields: Any) -> None:
    server.time.now += timedelta(seconds=1)
    await server.outcome(await server.save(model_id, number, name, **fields))


@pytest.mark.core("POST /api/v1/checkpoints/search")
async def test_checkpoints_are_found_by_each_thing_that_is_known_of_them(server: TestedServer) -> None:
    model_id = await server.model()
    session_id = model_id.partition(":")[0]
    await save(server, model_id, 1, "first", user_metadata={"seed": "1"})
    await save(server, model_id, 2, "second", user_metadata={"seed": "2"})
    (newest, oldest) = (await search(server))["checkpoints"]
    assert (newest["checkpoint_id"], oldest["checkpoint_id"]) == ("weights/second", "weights/first")
    assert await names(server, user_metadata={"seed": "1"}) == ["weights/first"]
    assert await names(server, checkpoint_type="sampler") == []
    assert await names(server, base_models=[newest["base_model"], "other"], checkpoint_type="training", limit=1) == [
        "weights/second"
    ]
    assert await names(server, base_models=[]) == []
    await server.client.put(f"/sessions/{session_id}/project", json={"project_id": "p1"})
    assert len(await names(server, project_ids=["p1"])) == 2
    refused = await server.post("/checkpoints/search", {"project_ids": ["p2"]})
    assert (refused.status_code, refused.json()["detail"]) == (
        404,
        "there is no project 'p2': no session of yours is assigned to it",
    )
    assert await names(server, owner={"type": "user", "owner_urns": ["urn:of:another"]}) == []


async def test_pages_have_each_checkpoint_once(server: TestedServer) -> None:
    model_id = await server.model()
    for number in range(1, 6):
        await server.outcome(await server.save(model_id, number, f"ck-{number}"))  # all at the same time
    found, cursor = list[str](), None
    while True:
        page = await search(server, limit=2, cursor=cursor)
        found += [each["checkpoint_id"] for each in page["checkpoints"]]
        if (cursor := page.get("next_cursor")) is None:
            break
    assert sorted(found) == [f"weights/ck-{number}" for number in range(1, 6)]


async def test_another_tenant_finds_nothing(server: TestedServer) -> None:
    await save(server, await server.model(), 1, "ck")
    stranger = await server.services.keys.create("stranger", "laptop")
    assert (await search(server, headers={"X-API-Key": stranger.secret}))["checkpoints"] == []


@pytest.mark.skipif(not hasattr(tinker.types, "CheckpointSearchRequest"), reason="the SDK is older than 0.39")
def test_the_sdk_has_the_fields_that_are_assumed() -> None:
    request = tinker.types.CheckpointSearchRequest
    assert set(request.model_fields) == FIELDS_OF_A_REQUEST
    assert "base_model" in tinker.types.Checkpoint.model_fields
