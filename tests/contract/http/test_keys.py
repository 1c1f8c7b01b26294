"""The calls of a key about itself: exchange for a token, description, revocation."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import httpx
import jwt
import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import TestedServer, running_server, settings_for

pytestmark = pytest.mark.core

NO_KEY = {"X-API-Key": ""}


async def new_key(server: TestedServer, tenant: str = "lab") -> str:
    return (await server.services.keys.create(tenant, "laptop")).secret


async def exchanged(server: TestedServer, key: str) -> str:
    answer = await server.post("/auth/token", {}, headers={"X-API-Key": key})
    token: str = answer.raise_for_status().json()["jwt"]
    return token


async def send_with(server: TestedServer, credential: str) -> httpx.Response:
    return await server.client.get("/auth/apikey/me", headers={"X-API-Key": credential})


async def test_a_token_speaks_for_its_keys_tenant(server: TestedServer) -> None:
    token = await exchanged(server, await new_key(server))
    headers = {"X-API-Key": token}
    session = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
    made = (await server.post("/create_session", session, headers=headers)).raise_for_status().json()
    assert (await server.client.get("/sessions", headers=headers)).json()["sessions"] == [made["session_id"]]
    assert (await server.client.get("/sessions")).json()["sessions"] == []


async def test_a_token_ends_with_its_hour_and_says_so_as_the_sdk_hears_it(server: TestedServer) -> None:
    token = await exchanged(server, await new_key(server))
    assert (await send_with(server, token)).status_code == 200
    server.time.now += timedelta(hours=1)
    over = await send_with(server, token)
    assert (over.status_code, over.headers["www-authenticate"]) == (401, 'Bearer error="invalid_token"')
    assert "has expired" in over.json()["detail"]


@pytest.mark.core("DELETE /api/v1/auth/apikey/me", "POST /api/v1/auth/token")
async def test_a_token_ends_with_its_key(tmp_path: Path, fleet: FakeFleet) -> None:
    """At once where that was said; other replicas may go by what they know for some seconds."""
    async with running_server(settings_for(tmp_path), fleet) as server:
        key = await new_key(server)
        token = await exchanged(server, key)
        revoked = await server.client.delete("/auth/apikey/me", headers={"X-API-Key": key})
        assert revoked.status_code == 200
        ended = await send_with(server, token)
        assert (ended.status_code, "www-authenticate" in ended.headers) == (401, False)


async def test_a_token_neither_prolongs_itself_nor_ends_its_key(server: TestedServer) -> None:
    """An overheard token would give its finder the key, or take it from its owner."""
    key = await new_key(server)
    token = await exchanged(server, key)
    server.time.pass_seconds(1800)
    again = await exchanged(server, token)
    assert (await send_with(server, again)).status_code == 200
    refused = await server.client.delete("/auth/apikey/me", headers={"X-API-Key": again})
    assert (refused.status_code, "use the key itself" in refused.json()["detail"]) == (422, True)
    server.time.pass_seconds(1800)
    assert [(await send_with(server, one)).status_code for one in (token, again, key)] == [401, 401, 200]


@pytest.mark.parametrize("algorithm", ["HS256", "none"])
async def test_a_token_with_another_signature_is_refused(server: TestedServer, algorithm: str) -> None:
    claims = jwt.decode(await exchanged(server, await new_key(server)), options={"verify_signature": False})
    forged = jwt.encode(claims, "x" * 32 if algorithm == "HS256" else "", algorithm)
    assert (await send_with(server, forged)).status_code == 401
    assert (await send_with(server, "eyJ.not.atoken")).status_code == 401


@pytest.mark.core("GET /api/v1/auth/apikey/me")
async def test_a_key_learns_its_name_and_tenant(server: TestedServer) -> None:
    key = await new_key(server)
    told = (await send_with(server, key)).json()
    assert (told["name"], told["note"]) == ("laptop", key[:10])
    assert told["details"] == {"org_details": {"name": "lab"}, "user_details": {"email": "lab"}}
    assert (await server.client.get("/auth/apikey/me", headers=NO_KEY)).status_code == 401


async def test_the_servers_own_key_cannot_end_itself(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path, api_key="tml-own"), fleet) as server:
        own = {"X-API-Key": "tml-own"}
        assert (await server.client.get("/auth/apikey/me", headers=own)).json()["key_id"] == 0
        refused = await server.client.delete("/auth/apikey/me", headers=own)
        assert (refused.status_code, "setting api_key" in refused.json()["detail"]) == (422, True)


async def test_tokens_of_a_key_are_counted_as_the_key(tmp_path: Path, fleet: FakeFleet) -> None:
    """Otherwise a tenant would have a rate for each token that it asks for."""
    async with running_server(settings_for(tmp_path, requests_per_minute=3), fleet) as server:
        key = await new_key(server)
        tokens = [await exchanged(server, key) for _ in range(2)]
        statuses = [(await send_with(server, each)).status_code for each in (key, *tokens)]
        assert statuses == [200, 429, 429]
