"""Roles of keys: a reader looks, a member also works in its tenant, and an admin also manages all tenants."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from support.server.fake_fleet import FakeFleet
from support.server.http_server import TestedServer, running_server, settings_for
from tinsmith_server.routes.http.dependencies import API_PREFIX
from tinsmith_server.services.accounts.roles import CALLS_OF_ADMINS, CALLS_OF_READERS
from tinsmith_server.store.records import Role

pytestmark = pytest.mark.core

WITHOUT_A_KEY = {
    "POST /telemetry",  # anyone may send it
    "PUT /uploads/{token}/{name}",  # the link is the permission
    "DELETE /console/session",  # it removes a cookie
    "POST /console/session/renew",  # it needs the console's cookie
}
VALUES = {"key_id": "1", "kind": "weights"}


async def key_of(server: TestedServer, role: Role, tenant: str = "default") -> dict[str, str]:
    return {"X-API-Key": (await server.services.keys.create(tenant, f"a {role}", role)).secret}


def calls(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Each method and path template of the application, but not the answers to wrong paths."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.endpoint.__name__ != "not_here":
            for method in sorted(route.methods):
                yield method, route.path


async def asked(server: TestedServer, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    filled = re.sub(r"{(\w+)(:path)?}", lambda found: VALUES.get(found[1], "x"), path)
    return await server.client.request(method, f"http://server{filled}", headers=headers)


async def test_a_reader_may_only_look_and_poll(server: TestedServer) -> None:
    """A new call that is not a GET is refused, unless it is in the list of calls of readers."""
    headers = await key_of(server, "reader")
    refused, known = set(), set()
    for method, path in calls(server.app):
        call = f"{method} {path.removeprefix(API_PREFIX)}"
        known.add(call)
        if call in WITHOUT_A_KEY or method == "GET":
            continue
        answer = await asked(server, method, path, headers)
        if answer.status_code == 403:
            refused.add(call)
            assert "the role reader" in answer.text
    allowed = {call for call in known if not call.startswith("GET ")} - refused
    assert allowed == (CALLS_OF_READERS & known) | WITHOUT_A_KEY
    assert known >= CALLS_OF_READERS | CALLS_OF_ADMINS, "the lists name calls that do not exist"
    samples = {"POST /asample", "POST /sample", "POST /oai/api/v1/completions", "POST /anthropic/api/v1/messages"}
    assert samples <= refused, "sampling costs"
    assert len(refused) > 35


async def test_only_an_admin_manages_tenants(server: TestedServer) -> None:
    headers = {role: await key_of(server, role) for role in ("reader", "member")}
    for call in sorted(CALLS_OF_ADMINS):
        method, path = call.split(" ")
        for role, key in headers.items():
            answer = await asked(server, method, API_PREFIX + path, key)
            assert (answer.status_code, f"role {role}" in answer.json()["detail"]) == (403, True), call
    for method, path in calls(server.app):
        is_stream = path.endswith("/live")  # its answer has no end
        if method == "GET" and f"GET {path.removeprefix(API_PREFIX)}" not in CALLS_OF_ADMINS and not is_stream:
            assert (await asked(server, method, path, headers["reader"])).status_code != 403, path


async def test_a_token_and_a_cookie_have_the_role_of_their_key(server: TestedServer) -> None:
    headers = await key_of(server, "reader")
    token = (await server.post("/auth/token", headers=headers)).json()["jwt"]
    assert (await server.post("/create_model", headers={"X-API-Key": token})).status_code == 403
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://server") as browser:
        session = (await browser.post("/console/session", headers=headers)).json()
        assert session["role"] == "reader"
        own = {"X-CSRF-Token": session["csrf_token"]}
        assert (await browser.post("/api/v1/create_model", json={}, headers=own)).status_code == 403
        assert (await browser.get("/api/v1/keys")).status_code == 403


async def test_a_dialect_refuses_a_reader_in_its_own_form(server: TestedServer) -> None:
    headers = await key_of(server, "reader")
    openai = await asked(server, "POST", "/v1/chat/completions", headers)
    assert (openai.status_code, "role member" in openai.json()["error"]["message"]) == (403, True)
    anthropic = await asked(server, "POST", "/v1/messages", headers)
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (403, "permission_error")


async def test_a_key_learns_its_role(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path), fleet) as server:
        told = [
            (await server.client.get("/auth/apikey/me", headers=headers)).json()["role"]
            for headers in ({}, await key_of(server, "reader"), await key_of(server, "member"))
        ]
    assert told == ["admin", "reader", "member"]
    async with running_server(settings_for(tmp_path / "other", api_key=None), fleet) as server:
        assert server.app.state.first_key.record.role == "admin"
