"""Stable names for saved samplers: set in one moment, rolled back, and never left without what they stand for."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.server.fake_fleet import BASE_MODEL
from support.server.http_server import TestedServer, one_server
from tinsmith_server.store.queries.checkpoints import CheckpointQueries

pytestmark = pytest.mark.core

HELLO = [{"role": "user", "content": "Hello"}]
DIALECTS = {"/oai/api/v1/chat/completions": {}, "/anthropic/api/v1/messages": {"max_tokens": 8}}


async def saved(server: TestedServer, *names: str, **fields: Any) -> list[str]:
    """Samplers of one model."""
    model_id = await server.model()
    paths = []
    for number, name in enumerate(names, 1):
        body = {"model_id": model_id, "seq_id": number, "path": name, **fields}
        paths.append((await server.outcome(await server.post("/save_weights_for_sampler", body)))["path"])
    return paths


async def strangers(server: TestedServer) -> dict[str, str]:
    return {"X-API-Key": (await server.services.keys.create("stranger", "theirs")).secret}


async def promoted(server: TestedServer, name: str, path: str, **fields: Any) -> httpx.Response:
    return await server.client.put(f"/promotions/{name}", json={"model_path": path, **fields})


async def rolled_back(server: TestedServer, name: str, **params: int) -> httpx.Response:
    return await server.client.post(f"/promotions/{name}/rollback", params=params)


async def stands_for(server: TestedServer) -> dict[str, str]:
    found = (await server.client.get("/promotions")).json()["promotions"]
    return {one["name"]: one["model_path"] for one in found}


async def history(server: TestedServer, name: str) -> list[tuple[str, bool]]:
    found = (await server.client.get(f"/promotions/{name}")).json()["promotions"]
    return [(one["model_path"].rpartition("/")[2], one["is_rollback"]) for one in found]


async def send(server: TestedServer, model: str, path: str = "/oai/api/v1/chat/completions") -> httpx.Response:
    body = {"model": model, "messages": HELLO, **DIALECTS[path]}
    return await server.client.post(f"http://server{path}", json=body)


def sampled_from(server: TestedServer) -> str:
    """Return the directory of the last sample's adapter."""
    return list(server.worker.samples.values())[-1].adapter.directory


async def directory_of(server: TestedServer, path: str) -> str:
    assert (await send(server, path)).status_code == 200
    return sampled_from(server)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_changed_name_applies_from_the_next_request(server: TestedServer, dialect: str) -> None:
    first, second = await saved(server, "one", "two")
    for path in (first, second):
        assert (await promoted(server, "prod", path)).json()["model_path"] == path
        for _ in range(2):  # at either of two servers
            assert (await send(server, "prod", dialect)).json()["model"] == "prod"
            by_name = sampled_from(server)
            assert by_name == await directory_of(server, path)
    assert (await rolled_back(server, "prod")).json()["model_path"] == first
    await send(server, "prod", dialect)
    assert sampled_from(server) == await directory_of(server, first)


@one_server
async def test_a_request_that_has_begun_ends_with_the_adapter_that_it_began_with(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await saved(server, "one", "two")
    await promoted(server, "prod", first)
    texts = server.services.texts
    render = texts._rendered

    async def promote_then_render(*arguments: Any) -> Any:
        await promoted(server, "prod", second)
        return await render(*arguments)

    monkeypatch.setattr(texts, "_rendered", promote_then_render)
    body = {"model": "prod", "prompt": ["Hello", "Ada"]}
    assert (await server.client.post("http://server/oai/api/v1/completions", json=body)).status_code == 200
    directories = [sample.adapter.directory for sample in server.worker.samples.values()]
    monkeypatch.undo()
    assert directories == [await directory_of(server, first)] * 2
    await send(server, "prod")
    assert sampled_from(server) == await directory_of(server, second)


@pytest.mark.core(
    "POST /api/v1/promotions/{name}/rollback",
    "PUT /api/v1/promotions/{name}",
    "GET /api/v1/promotions/{name}",
)
async def test_a_rollback_goes_back_one_and_another_one_further(server: TestedServer) -> None:
    paths = await saved(server, "one", "two", "three", "four")
    for path in paths[:3]:
        await promoted(server, "prod", path)
    for path in (paths[1], paths[0]):
        assert (await rolled_back(server, "prod")).json()["model_path"] == path
    refused = await rolled_back(server, "prod")
    assert (refused.status_code, "prod had no path before" in refused.text) == (422, True)
    await promoted(server, "prod", paths[3])
    await rolled_back(server, "prod")
    assert await history(server, "prod") == [
        ("one", True),
        ("four", False),
        ("one", True),
        ("two", True),
        ("three", False),
        ("two", False),
        ("one", False),
    ]


async def test_a_rollback_that_is_repeated_after_a_lost_answer_rolls_back_once(server: TestedServer) -> None:
    paths = await saved(server, "one", "two", "three")
    for path in paths:
        await promoted(server, "prod", path)
    made = await rolled_back(server, "prod", expected_number=3)
    assert (made.json()["model_path"], made.json()["number"]) == (paths[1], 4)
    assert (await rolled_back(server, "prod", expected_number=3)).json() == made.json()
    await promoted(server, "prod", paths[2])
    for expected in (2, 3, 4, 6):
        refused = await rolled_back(server, "prod", expected_number=expected)
        said = f"the last change of prod is number 5 now, not {expected}: the name refers to {paths[2]}"
        assert (refused.status_code, refused.json()["detail"]) == (422, said)
    assert await stands_for(server) == {"prod": paths[2]}
    both = await asyncio.gather(*(rolled_back(server, "prod", expected_number=5) for _ in range(2)))
    assert [one.json()["number"] for one in both] == [6, 6]


@pytest.mark.core("GET /api/v1/promotions")
async def test_a_name_is_changed_only_from_its_expected_value(server: TestedServer) -> None:
    first, second = await saved(server, "one", "two")
    assert (await promoted(server, "prod", first, expected_path=None)).status_code == 200
    for expected in (None, second):
        refused = await promoted(server, "prod", second, expected_path=expected)
        assert refused.status_code == 422
        assert refused.json()["detail"] == f"prod now refers to {first}, not to {expected or 'nothing'}"
    assert await stands_for(server) == {"prod": first}
    assert (await promoted(server, "prod", second, expected_path=first)).status_code == 200
    assert "now refers to nothing" in (await promoted(server, "beta", first, expected_path=first)).text


@pytest.mark.core("DELETE /api/v1/promotions/{name}")
async def test_a_promoted_checkpoint_does_not_expire(server: TestedServer) -> None:
    first, second = await saved(server, "one", "two")
    run = first.split("/")[2]
    await promoted(server, "prod", first)
    await promoted(server, "beta", first)
    url = f"/training_runs/{run}/checkpoints/sampler_weights/one"
    for refused in (await server.client.delete(url), await server.client.put(f"{url}/ttl", json={"ttl_seconds": 7200})):
        assert refused.status_code == 422
        assert refused.json()["detail"].startswith(
            f"beta, prod refers to {first}: promote another checkpoint, roll back"
        )
    assert (await server.client.put(f"{url}/ttl", json={"ttl_seconds": None})).status_code == 200
    await promoted(server, "prod", second)
    assert (await server.client.delete("/promotions/beta")).status_code == 200
    assert (await server.client.delete(url)).status_code == 200
    refused = await rolled_back(server, "prod")
    assert refused.status_code == 422
    assert (
        refused.json()["detail"]
        == f"prod cannot be rolled back: there is no checkpoint {first}; promote another checkpoint"
    )
    assert await stands_for(server) == {"prod": second}


async def test_a_sampler_that_ends_by_itself_is_not_promoted(server: TestedServer) -> None:
    (path,) = await saved(server, "brief", ttl_seconds=7200)
    refused = await promoted(server, "prod", path)
    assert refused.status_code == 422
    assert "a promoted checkpoint must not expire: remove its expiry first" in refused.text
    run = path.split("/")[2]
    await server.client.put(f"/training_runs/{run}/checkpoints/sampler_weights/brief/ttl", json={"ttl_seconds": None})
    assert (await promoted(server, "prod", path)).status_code == 200


async def test_a_name_says_so_when_its_sampler_is_gone(server: TestedServer) -> None:
    (path,) = await saved(server, "one")
    await promoted(server, "prod", path)
    run = path.split("/")[2]
    await server.services._store.delete_checkpoint(run, "sampler", "one", server.time.now)
    answer = await send(server, "prod")
    assert answer.status_code == 404
    said = f"prod refers to {path}, which is gone: promote another checkpoint, or roll back"
    assert answer.json()["error"]["message"] == said


@pytest.mark.parametrize("name", ["a" * 65, "-a", ".a", "a b", "a:b", "ä", "a%2Fb"])
async def test_an_invalid_name_is_refused(server: TestedServer, name: str) -> None:
    (path,) = await saved(server, "one")
    refused = await promoted(server, name, path)
    assert refused.status_code in (404, 422)
    assert await stands_for(server) == {}


@pytest.mark.core("GET /oai/api/v1/models/{name}", "GET /anthropic/api/v1/models/{name}")
async def test_names_stand_among_the_models_behind_the_base_models(server: TestedServer) -> None:
    (path,) = await saved(server, "one")
    await promoted(server, "prod", path)
    found = (await server.client.get("http://server/oai/api/v1/models")).json()["data"]
    ids = [one["id"] for one in found]
    assert ids.index(BASE_MODEL) < ids.index("prod") < ids.index(path)
    one = (await server.client.get("http://server/oai/api/v1/models/prod")).json()
    assert (await server.client.get("http://server/anthropic/api/v1/models/prod")).json()["id"] == one["id"]
    assert (one["id"], one["created"] > 0) == ("prod", True)


@one_server
@pytest.mark.core("GET /api/v1/audit")
async def test_a_promotion_is_in_the_audit_log(server: TestedServer) -> None:
    first, second = await saved(server, "one", "two")
    for path in (first, second):
        await promoted(server, "prod", path)
    await rolled_back(server, "prod")
    await server.client.delete("/promotions/prod")
    entries = (await server.client.get("/audit")).json()["entries"]
    told = [
        (one["event"], one["tinker_path"], one["event_details"]["is_rollback"])
        for one in entries
        if "moted" in one["event"]
    ]
    assert told == [
        ("checkpoint_promoted", first, False),
        ("checkpoint_promoted", second, False),
        ("checkpoint_promoted", first, True),
        ("checkpoint_demoted", first, True),
    ]
    assert {one["event_details"]["name"] for one in entries if "moted" in one["event"]} == {"prod"}


@pytest.mark.parametrize("ending", ["delete_checkpoint", "set_checkpoint_expiry"])
async def test_a_name_that_is_promoted_while_its_sampler_ends_stops_that(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    (path,) = await saved(server, "one")
    url = f"/training_runs/{path.split('/')[2]}/checkpoints/sampler_weights/one"
    change = getattr(CheckpointQueries, ending)

    async def promoted_first(self: CheckpointQueries, *named: Any, **conditions: bool) -> Any:
        assert (await promoted(server, "prod", path)).status_code == 200
        return await change(self, *named, **conditions)

    monkeypatch.setattr(CheckpointQueries, ending, promoted_first)
    if ending == "delete_checkpoint":
        refused = await server.client.delete(url)
    else:
        refused = await server.client.put(f"{url}/ttl", json={"ttl_seconds": 7200})
    assert (refused.status_code, "prod refers to" in refused.json()["detail"]) == (422, True)
    assert await stands_for(server) == {"prod": path}


async def test_names_are_their_tenants_alone(server: TestedServer) -> None:
    (path,) = await saved(server, "one")
    await promoted(server, "prod", path)
    headers = await strangers(server)
    assert (await server.client.get("/promotions", headers=headers)).json() == {"promotions": []}
    for method, call in (
        ("GET", "/promotions/prod"),
        ("DELETE", "/promotions/prod"),
        ("POST", "/promotions/prod/rollback"),
    ):
        answer = await server.client.request(method, call, headers=headers)
        assert (answer.status_code, answer.json()["detail"]) == (404, "you have no promoted name prod")
    body = {"model": "prod", "messages": HELLO}
    unknown = await server.client.post("http://server/oai/api/v1/chat/completions", json=body, headers=headers)
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"].startswith("there is no model 'prod'")
    models = (await server.client.get("http://server/oai/api/v1/models", headers=headers)).json()["data"]
    assert "prod" not in [one["id"] for one in models]


async def test_a_checkpoint_of_another_tenant_is_not_promoted_even_if_it_is_published(server: TestedServer) -> None:
    (path,) = await saved(server, "one")
    headers, body = await strangers(server), {"model_path": path}
    hidden = await server.client.put("/promotions/prod", json=body, headers=headers)
    assert (hidden.status_code, hidden.json()["detail"]) == (404, f"there is no checkpoint {path}")
    await server.post(f"/training_runs/{path.split('/')[2]}/checkpoints/sampler_weights/one/publish")
    public = await server.client.put("/promotions/prod", json=body, headers=headers)
    assert (public.status_code, "promote a copy" in public.text) == (422, True)
