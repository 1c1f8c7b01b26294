"""The calls of admins: keys, limits of tenants, and workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import API_KEY, TestedServer, running_server, running_servers, settings_for
from tinsmith_server.services.accounts import keys, limits

pytestmark = pytest.mark.core

NEW_KEY = {"tenant": "lab", "name": "laptop", "role": "member"}


@pytest.fixture
async def keyed_server(tmp_path: Path, fleet: FakeFleet) -> AsyncIterator[TestedServer]:
    """Return a server without a static key, and a client with the first key."""
    async with running_server(settings_for(tmp_path, api_key=None), fleet) as server:
        server.client.headers["X-API-Key"] = server.app.state.first_key.secret
        yield server


async def made_key(server: TestedServer, **fields: str) -> dict[str, Any]:
    answer = await server.post("/keys", NEW_KEY | fields)
    made: dict[str, Any] = answer.raise_for_status().json()
    return made


async def set_limits(server: TestedServer, tenant: str, **values: Any) -> httpx.Response:
    return await server.client.put(f"/tenants/{tenant}/limits", json=values)


# ---- keys


@pytest.mark.core("GET /api/v1/keys", "POST /api/v1/keys", "DELETE /api/v1/keys/{key_id}")
async def test_an_admin_makes_lists_and_revokes_keys(keyed_server: TestedServer) -> None:
    made = await made_key(keyed_server, role="reader")
    secret = made.pop("key")
    assert secret.startswith(made["prefix"])
    assert {name: made[name] for name in NEW_KEY} == NEW_KEY | {"role": "reader"}
    own = {"X-API-Key": secret}
    assert (await keyed_server.client.get("/sessions", headers=own)).status_code == 200
    listed = (await keyed_server.client.get("/keys")).json()["keys"]
    assert [key["role"] for key in listed] == ["admin", "reader"]
    assert listed[1] == made
    assert secret not in (await keyed_server.client.get("/keys")).text
    for _ in range(2):
        assert (await keyed_server.client.delete(f"/keys/{made['key_id']}")).json() == {}
    assert (await keyed_server.client.get("/sessions", headers=own)).status_code == 401, "at once on this server"
    assert "revoked_at" in (await keyed_server.client.get("/keys")).json()["keys"][1]
    assert (await keyed_server.client.delete("/keys/4711")).status_code == 404


async def test_the_last_key_of_an_admin_cannot_be_revoked(keyed_server: TestedServer) -> None:
    await made_key(keyed_server)
    (first,) = [key for key in (await keyed_server.client.get("/keys")).json()["keys"] if key["role"] == "admin"]
    for path in (f"/keys/{first['key_id']}", "/auth/apikey/me"):
        refused = await keyed_server.client.delete(path)
        assert (refused.status_code, "last key with the role admin" in refused.json()["detail"]) == (409, True)
    second = await made_key(keyed_server, role="admin")
    assert (await keyed_server.client.delete("/auth/apikey/me")).status_code == 200
    keyed_server.client.headers["X-API-Key"] = second["key"]
    assert (await keyed_server.client.delete(f"/keys/{second['key_id']}")).status_code == 409


async def test_a_static_key_remains_an_admin(server: TestedServer) -> None:
    only = await made_key(server, role="admin")
    assert (await server.client.delete(f"/keys/{only['key_id']}")).status_code == 200


async def test_of_two_admins_who_revoke_each_other_one_stays(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_servers(settings_for(tmp_path, api_key=None), fleet) as (first, second):
        first.client.headers["X-API-Key"] = first.app.state.first_key.secret
        other = await made_key(first, role="admin")
        second.client.headers["X-API-Key"] = other["key"]
        (one, *_) = (await first.client.get("/keys")).json()["keys"]
        answers = await asyncio.gather(
            first.client.delete(f"/keys/{other['key_id']}"), second.client.delete(f"/keys/{one['key_id']}")
        )
        assert sorted(answer.status_code for answer in answers) in ([200, 401], [200, 409])
        assert len([key for key in await first.services.keys.list() if key.revoked_at is None]) == 1


async def test_a_token_of_an_admin_makes_no_key_that_would_outlive_it(server: TestedServer) -> None:
    token = (await server.post("/auth/token")).json()["jwt"]
    made = await made_key(server)
    by_token = {"X-API-Key": token}
    assert (await server.client.get("/keys", headers=by_token)).status_code == 200
    for refused in (
        await server.client.post("/keys", json=NEW_KEY, headers=by_token),
        await server.client.delete(f"/keys/{made['key_id']}", headers=by_token),
    ):
        assert (refused.status_code, "a token cannot create or revoke keys" in refused.json()["detail"]) == (403, True)


async def test_an_admin_manages_keys_in_the_console(server: TestedServer) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://server") as browser:
        session = (await browser.post("/console/session", headers={"X-API-Key": API_KEY})).json()
        own = {"X-CSRF-Token": session["csrf_token"]}
        assert (await browser.post("/api/v1/keys", json=NEW_KEY)).status_code == 403
        made = (await browser.post("/api/v1/keys", json=NEW_KEY, headers=own)).json()
        assert (await browser.delete(f"/api/v1/keys/{made['key_id']}", headers=own)).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "two\nlines"},
        {"name": "x\r\nSet-Cookie: a=b"},
        {"name": "\x1b[2J"},
        {"name": "nul\0"},
        {"name": "n" * 201},
        {"name": 7},
        {"name": "\ud800"},
        {"tenant": "Upper"},
        {"tenant": "../etc"},
        {"tenant": ""},
        {"tenant": None},
        {"tenant": "t" * 10_000},
        {"role": "root"},
        {"role": None},
    ],
)
async def test_a_key_with_an_impossible_name_is_refused(server: TestedServer, wrong: dict[str, Any]) -> None:
    refused = await server.client.post("/keys", content=json.dumps(NEW_KEY | wrong))
    assert refused.status_code == 422
    assert len(refused.json()["detail"]) < 1000
    assert (await server.client.get("/keys")).json()["keys"] == []


@pytest.mark.parametrize("key_id", ["0", "-1", "x", "1.5", str(2**63), "1 OR 1=1", "%00"])
async def test_a_number_that_no_key_can_have_is_refused(server: TestedServer, key_id: str) -> None:
    assert (await server.client.delete(f"/keys/{key_id}")).status_code in {404, 422}


# ---- tenants


@pytest.mark.core("GET /api/v1/tenants", "PUT /api/v1/tenants/{tenant}/limits")
async def test_tenants_are_shown_with_their_limits_and_their_use(server: TestedServer) -> None:
    await made_key(server)
    model = await server.model()
    await server.outcome(await server.save(model, 1, "ck"))
    some = {"adapters": 3, "requests_per_second": 2.5, "share_weight": 2.0}
    assert (await set_limits(server, "lab", **some, checkpoint_bytes=None)).json() == some
    listed = {one["tenant"]: one for one in (await server.client.get("/tenants")).json()["tenants"]}
    assert listed["lab"] == {
        "tenant": "lab",
        "keys": 1,
        "limits": some,
        "used": {"adapters": 0, "queued_operations": 0, "checkpoint_bytes": 0},
    }
    assert (listed["default"]["limits"], listed["default"]["used"]["adapters"]) == ({}, 1)
    assert listed["default"]["used"]["checkpoint_bytes"] > 0
    assert (await set_limits(server, "lab")).json() == {}
    assert (await server.client.get("/tenants")).json()["tenants"][1]["limits"] == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"adapters": -1},
        {"adapters": "3"},
        {"adapters": 2**70},
        {"adapters": True},
        {"requests_per_second": 0},
        {"checkpoints_kept": 0},
        {"share_weight": 0},
        {"share_weight": 1e9},
        {"adaptors": 3},
    ],
)
async def test_impossible_limits_are_refused_and_change_nothing(server: TestedServer, wrong: dict[str, Any]) -> None:
    await set_limits(server, "lab", adapters=3)
    assert (await set_limits(server, "lab", **wrong)).status_code == 422
    assert (await set_limits(server, "..%2Fetc", adapters=3)).status_code in {404, 422}
    assert limits.as_dict(await server.services.limits.of("lab")) == {"adapters": 3}


async def test_a_limit_replaces_the_setting_for_its_tenant_alone(server: TestedServer) -> None:
    await set_limits(server, "default", adapters=1)
    await server.model()
    second = await server.create_model(await server.session(), 0)
    told = (await server.result(second.json()["request_id"])).json()
    assert "you have 1 models, and the limit is 1" in told["error"]
    await set_limits(server, "default", adapters=2, checkpoint_bytes=1)
    model = await server.model()
    await server.outcome(await server.save(model, 1, "fits"))
    refused = await server.outcome(await server.save(model, 2, "too-much"))
    assert "your tenant's limit checkpoint_bytes" in refused["error"]


async def test_a_rate_of_a_tenant_counts_all_its_keys_together(server: TestedServer) -> None:
    both = [{"X-API-Key": (await made_key(server))["key"]} for _ in range(2)]
    await set_limits(server, "lab", requests_per_second=0.05)
    statuses = [(await server.client.get("/sessions", headers=both[number % 2])).status_code for number in range(4)]
    assert statuses == [200, 200, 200, 429]
    assert (await server.client.get("/sessions")).status_code == 200
    assert (await server.post("/session_heartbeat", {"session_id": "x"}, headers=both[0])).status_code == 404


async def test_other_replicas_see_a_limit_within_seconds(
    tmp_path: Path, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limits.CACHE_SECONDS <= keys.CACHE_SECONDS <= 5
    monkeypatch.setattr(limits, "CACHE_SECONDS", 0.0)
    async with running_servers(settings_for(tmp_path), fleet) as (first, second):
        assert await second.services.limits.adapters("lab") == 1024
        await set_limits(first, "lab", adapters=7)
        assert await second.services.limits.adapters("lab") == 7


async def test_only_the_newest_checkpoints_of_each_kind_are_kept_if_a_tenant_says_so(server: TestedServer) -> None:
    model = await server.model()
    for number, name in enumerate(("public", "old", "new", "newest")):
        server.time.pass_seconds(1)
        await server.outcome(await server.save(model, number + 1, name))
    body = {"model_id": model, "seq_id": 5, "path": "promoted"}
    await server.outcome(await server.post("/save_weights_for_sampler", body))
    server.time.pass_seconds(1)
    await server.outcome(await server.post("/save_weights_for_sampler", {**body, "seq_id": 6, "path": "later"}))
    await server.client.post(f"/training_runs/{model}/checkpoints/weights/public/publish")
    path = f"tinker://{model}/sampler_weights/promoted"
    (await server.client.put("/promotions/prod", json={"model_path": path})).raise_for_status()
    await set_limits(server, "default", checkpoints_kept=1)
    await server.services.background.sweep_now()
    listed = (await server.client.get("/checkpoints")).json()["checkpoints"]
    assert {one["checkpoint_id"].rpartition("/")[2] for one in listed} == {"public", "newest", "promoted", "later"}
    entries = (await server.client.get("/audit")).json()["entries"]
    deleted = [one["event_details"] for one in entries if one["event"] == "checkpoint_deleted"]
    assert [one["checkpoints_kept"] for one in deleted] == [1, 1]


async def test_the_weight_of_a_tenants_share_reaches_the_worker(server: TestedServer) -> None:
    model = await server.model()
    await set_limits(server, "default", share_weight=2.5)
    await server.forward_backward(model, 1)
    assert server.worker.share_weight == 2.5
    await set_limits(server, "default")
    await server.forward_backward(model, 2)
    assert server.worker.share_weight == 1


# ---- workers


@pytest.mark.core("GET /api/v1/workers")
async def test_an_admin_sees_what_each_worker_does(server: TestedServer) -> None:
    before = (await server.client.get("/workers")).json()["workers"]
    assert {one["state"] for one in before} <= {"stopped", "silent", "running"}
    await server.model()
    await server.services.inspection.refresh()
    (worker,) = [one for one in (await server.client.get("/workers")).json()["workers"] if one["name"] == "tiny-1"]
    assert (worker["base_model"], worker["kind"], worker["state"]) == ("org/tiny", "trainer", "running")
    assert {
        "models",
        "slots",
        "queued",
        "samples_active",
        "trained_tokens",
        "journal_bytes",
        "running_seconds",
    } <= worker.keys()


# ---- the audit log


async def test_the_audit_log_names_the_key_of_each_action(server: TestedServer) -> None:
    made = await made_key(server, tenant="default")
    own = {"X-API-Key": made["key"]}
    session = await server.session(headers=own)
    body = {"session_id": session, "model_seq_id": 0, "base_model": "org/tiny"}
    model = (await server.post("/create_model", body, headers=own)).json()["model_id"]
    # Another key polls, and so fetches the worker's report of the save.
    await server.outcome(await server.save(model, 1, "ck"))
    server.time.now = datetime.now(UTC)  # the worker's own clock runs
    await server.client.put(f"/training_runs/{model}/checkpoints/weights/ck/ttl", json={"ttl_seconds": 7200})
    await server.client.delete(f"/training_runs/{model}/checkpoints/weights/ck", headers=own)
    await set_limits(server, "default", adapters=5)
    await server.client.delete(f"/keys/{made['key_id']}")
    entries = (await server.client.get("/audit")).json()["entries"]
    static = "the server's static key"
    assert [(one["event"], one["event_details"]["key"]["name"]) for one in entries] == [
        ("key_created", static),
        ("checkpoint_saved", "laptop"),
        ("checkpoint_ttl_set", static),
        ("checkpoint_deleted", "laptop"),
        ("limits_set", static),
        ("key_revoked", static),
    ]
    assert entries[1]["event_details"]["key"]["prefix"] == made["prefix"]
    assert API_KEY not in str(entries)
    assert (entries[0]["tinker_path"], "tinker_path" in entries[0]["event_details"]) == (None, False)
    of_accounts = (await server.client.get("/audit", params={"event_type": "organizations"})).json()["entries"]
    assert [one["event"] for one in of_accounts] == ["key_created", "limits_set", "key_revoked"]
    of_checkpoints = (await server.client.get("/audit", params={"event_type": "checkpoints"})).json()["entries"]
    assert len(of_checkpoints) == 3
