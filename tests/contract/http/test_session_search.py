"""Sessions are found by what is known of them, and by their own tenant alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from support.server.http_server import TestedServer

pytestmark = pytest.mark.core

SUCCESS = {"reason": {"type": "success"}, "detail": "done"}


async def create(server: TestedServer, **fields: Any) -> str:
    server.time.now += timedelta(seconds=1)
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0", **fields}
    session_id: str = (await server.post("/create_session", body)).json()["session_id"]
    return session_id


async def search(server: TestedServer, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    answer = await server.post("/sessions/search", body, headers=headers)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


async def ids(server: TestedServer, **body: Any) -> list[str]:
    return [session["session_id"] for session in (await search(server, **body))["sessions"]]


async def test_a_summary_has_the_content_and_the_end_of_the_session(server: TestedServer) -> None:
    model_id = await server.model()
    session_id = model_id.split(":", maxsplit=1)[0]
    await server.outcome(await server.save(model_id, 1, "ck"))
    (running,) = (await search(server))["sessions"]
    assert (running["checkpoints_count"], running["status"]) == (1, {"type": "active"})
    assert running["checkpoint_storage_bytes"] > 0
    await server.post(f"/sessions/{session_id}/finish", SUCCESS)
    (ended,) = (await search(server))["sessions"]
    assert ended["status"] == {"type": "client_finished", "reason": {"type": "success"}, "detail": "done"}


@pytest.mark.core("POST /api/v1/sessions/search")
async def test_sessions_are_found_by_each_thing_that_is_known_of_them(server: TestedServer) -> None:
    first = await create(server, display_name="Long Maths run", project_id="p1", user_metadata={"seed": "1"})
    second = await create(server, display_name="short chat", project_id="p2", user_metadata={"seed": "2"})
    await server.post(f"/sessions/{second}/finish", SUCCESS)
    assert await ids(server) == [second, first]
    assert await ids(server, display_name="maths LONG") == [first]
    assert await ids(server, display_name="maths", session_id=second) == [second, first]
    assert await ids(server, project_ids=["p2", "p3"]) == [second]
    assert await ids(server, user_metadata={"seed": "1"}) == [first]
    assert await ids(server, statuses=[{"type": "active"}]) == [first]
    assert await ids(server, statuses=[{"type": "client_finished", "reasons": ["success"]}]) == [second]
    assert await ids(server, statuses=[{"type": "client_finished", "reasons": ["errored"]}, {"type": "failed"}]) == []


@pytest.mark.core("PUT /api/v1/sessions/{session_id}/project")
async def test_a_session_that_moves_takes_its_runs_along(server: TestedServer) -> None:
    model_id = await server.model()
    path = f"/sessions/{model_id.split(':', maxsplit=1)[0]}/project"
    assert (await server.client.put(path, json={"project_id": "there"})).status_code == 200
    runs = (await server.client.get("/training_runs", params={"project_id": "there"})).json()["training_runs"]
    assert [run["training_run_id"] for run in runs] == [model_id]


@pytest.mark.parametrize(
    "body", [{"limit": 201}, {"owner": {"type": "everybody"}}, {"statuses": []}, {"cursor": {"last_created_at": "now"}}]
)
async def test_an_invalid_search_is_refused_with_a_message(server: TestedServer, body: dict[str, Any]) -> None:
    refused = await server.post("/sessions/search", body)
    assert (refused.status_code, next(iter(body)) in refused.json()["detail"]) == (422, True)
