"""The console's session: a key is exchanged for a cookie, which changes something only for the console's own page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import API_KEY, TestedServer, running_server, running_servers, settings_for
from tinsmith_server.services.runs import series

pytestmark = pytest.mark.core

SESSION = "/console/session"
NEW_SESSION = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
HOUR = 3600


@dataclass(frozen=True)
class Browser:
    """A browser that keeps cookies, and a page that has read the answer to its login."""

    client: httpx.AsyncClient
    told: dict[str, Any]

    @property
    def csrf(self) -> dict[str, str]:
        return {"X-CSRF-Token": self.told["csrf_token"]}

    async def create_session(self, **headers: str) -> httpx.Response:
        return await self.client.post("/api/v1/create_session", json=NEW_SESSION, headers=headers)


@asynccontextmanager
async def browser(server: TestedServer, url: str = "https://server.example", root: str = "") -> AsyncIterator[Any]:
    transport = httpx.ASGITransport(server.app, root_path=root)
    async with httpx.AsyncClient(transport=transport, base_url=url) as client:
        yield client


@asynccontextmanager
async def logged_in(server: TestedServer, key: str = API_KEY) -> AsyncIterator[Browser]:
    async with browser(server) as client:
        answer = await client.post(SESSION, headers={"X-API-Key": key})
        yield Browser(client, answer.raise_for_status().json())


async def new_key(server: TestedServer, tenant: str = "lab") -> str:
    return (await server.services.keys.create(tenant, "laptop")).secret


@pytest.mark.parametrize(
    ("url", "root", "secure", "path"),
    [("https://server.example", "", True, "/"), ("http://127.0.0.1:8000", "/tinsmith", "", "/tinsmith")],
)
async def test_a_login_leaves_a_cookie_that_no_page_can_read(
    server: TestedServer, url: str, root: str, secure: object, path: str
) -> None:
    async with browser(server, url, root) as client:
        answer = await client.post(f"{root}{SESSION}", headers={"X-API-Key": await new_key(server)})
    (morsel,) = SimpleCookie(answer.headers["set-cookie"]).values()
    assert (morsel.key, morsel["httponly"], morsel["samesite"]) == ("tinsmith_console", True, "strict")
    assert (morsel["secure"], morsel["path"], morsel["max-age"]) == (secure, path, str(HOUR))
    told = answer.json()
    assert (told["tenant"], told["role"], told["key_name"]) == ("lab", "member", "laptop")
    assert told.keys() == {"tenant", "role", "key_name", "csrf_token", "expires_at"}
    assert morsel.value not in answer.text
    assert answer.headers["cache-control"] == "no-store"


async def test_the_cookie_opens_every_api_as_its_keys_tenant(server: TestedServer) -> None:
    async with logged_in(server, await new_key(server)) as page:
        made = (await page.create_session(**page.csrf)).raise_for_status().json()
        assert (await page.client.get("/api/v1/sessions")).json()["sessions"] == [made["session_id"]]
        for path in ("/v1/models", "/oai/api/v1/models", "/anthropic/api/v1/models", "/api/v1/auth/apikey/me", "/docs"):
            assert (await page.client.get(path)).status_code == 200, path
            assert (await page.client.head(path)).status_code == 200, path
        assert (await page.client.get(SESSION)).json() == page.told
    assert (await server.client.get("/sessions")).json()["sessions"] == []


async def test_a_change_needs_the_csrf_token_of_the_same_login(server: TestedServer) -> None:
    async with logged_in(server) as page, logged_in(server) as other:
        foreign: list[dict[str, str]] = [{}, {"X-CSRF-Token": ""}, {"X-CSRF-Token": "é"}, other.csrf]
        for headers in foreign:
            encoded = {name: value.encode() for name, value in headers.items()}
            refused = await page.client.post("/api/v1/create_session", json=NEW_SESSION, headers=encoded)
            assert (refused.status_code, "X-CSRF-Token" in refused.json()["detail"]) == (403, True)
            for method, path in (("POST", f"{SESSION}/renew"), ("DELETE", SESSION), ("POST", "/v1/completions")):
                assert (await page.client.request(method, path, headers=encoded)).status_code == 403
        assert (await page.create_session(**page.csrf)).status_code == 200


async def test_a_key_in_a_header_has_precedence_over_the_cookie(server: TestedServer) -> None:
    async with logged_in(server, await new_key(server)) as page:
        for headers in ({"X-API-Key": API_KEY}, {"Authorization": f"Bearer {API_KEY}"}):
            await page.create_session(**headers)
        assert (await page.client.get("/api/v1/sessions")).json()["sessions"] == []
    assert len((await server.client.get("/sessions")).json()["sessions"]) == 2


async def test_a_session_is_renewed_until_twelve_hours_after_its_login(server: TestedServer) -> None:
    async with logged_in(server) as page:
        for _ in range(13):
            server.time.pass_seconds(HOUR - 60)
            renewed = await page.client.post(f"{SESSION}/renew", headers=page.csrf)
            assert renewed.status_code == 200, "the last hour is shorter"
            assert renewed.json()["csrf_token"] == page.told["csrf_token"], "another tab may hold it"
            if renewed.headers["set-cookie"].partition("Max-Age=")[2].partition(";")[0] != str(HOUR):
                break
        server.time.pass_seconds(HOUR)
        assert (await page.client.post(f"{SESSION}/renew", headers=page.csrf)).status_code == 401
        assert (await page.client.get("/api/v1/sessions")).status_code == 401


async def test_a_session_that_is_not_renewed_ends_after_an_hour(server: TestedServer) -> None:
    async with logged_in(server) as page:
        server.time.pass_seconds(HOUR)
        ended = await page.client.get(SESSION)
        assert (ended.status_code, "log in" in ended.json()["detail"]) == (401, True)


async def test_the_cookie_gets_no_token_that_would_outlive_a_logout(server: TestedServer) -> None:
    async with logged_in(server) as page:
        refused = await page.client.post("/api/v1/auth/token", headers=page.csrf)
        assert (refused.status_code, "exchange the key itself" in refused.json()["detail"]) == (403, True)


async def test_a_common_token_is_not_renewed(server: TestedServer) -> None:
    token = (await server.post("/auth/token")).json()["jwt"]
    async with browser(server) as client:
        assert (await client.post(f"{SESSION}/renew", headers={"X-API-Key": token})).status_code == 401


async def test_a_logout_ends_the_session_and_removes_the_cookie(server: TestedServer) -> None:
    async with logged_in(server) as page, logged_in(server) as other:
        copied = page.client.cookies["tinsmith_console"]
        gone = await page.client.delete(SESSION, headers=page.csrf)
        assert (gone.status_code, gone.content, page.client.cookies) == (204, b"", httpx.Cookies())
        assert (await page.client.get(SESSION)).status_code == 401
        assert (await page.client.delete(SESSION)).status_code == 204, "a cookie that has expired is removable"
        for headers in ({"Cookie": f"tinsmith_console={copied}"}, {"X-API-Key": copied}):
            assert (await page.client.get("/api/v1/sessions", headers=headers)).status_code == 401
            assert (await page.client.get(SESSION, headers=headers)).status_code == 401
            renewed = await page.client.post(f"{SESSION}/renew", headers=headers | page.csrf)
            assert (renewed.status_code, "set-cookie" in renewed.headers) == (401, False)
        assert (await other.client.get(SESSION)).status_code == 200, "another login with the same key stays"


async def test_a_session_ends_with_its_key(tmp_path: Path, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith_server.services.accounts.keys.CACHE_SECONDS", 0.0)
    async with running_server(settings_for(tmp_path), fleet) as server:
        made = await server.services.keys.create("lab", "laptop")
        async with logged_in(server, made.secret) as page:
            await server.services.keys.revoke(made.record.key_id)
            assert (await page.client.get(SESSION)).status_code == 401
            assert (await page.client.get("/api/v1/sessions")).status_code == 401
            assert (await page.client.post(f"{SESSION}/renew", headers=page.csrf)).status_code == 401


async def test_a_stream_ends_with_the_logout_of_its_session_and_with_its_key(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream may be open for days, and its key is checked at each event."""
    monkeypatch.setattr(series, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(series, "ALIVE_LOOKS", 1)
    made = await server.services.keys.create("default", "laptop")
    async with logged_in(server, made.secret) as page:
        by_cookie = asyncio.create_task(page.client.get("/api/v1/training_runs/live"))
        headers = {"X-API-Key": made.secret}
        by_key = asyncio.create_task(server.client.get("/training_runs/live", headers=headers))
        await asyncio.sleep(0.1)
        await page.client.delete(SESSION, headers=page.csrf)
        async with asyncio.timeout(10):
            assert (await by_cookie).text.startswith("data: {}")
        assert not by_key.done()
        await server.services.keys.revoke(made.record.key_id)
        async with asyncio.timeout(10):
            assert (await by_key).status_code == 200


async def test_every_replica_knows_a_session(tmp_path: Path, fleet: FakeFleet) -> None:
    async with (
        running_servers(settings_for(tmp_path), fleet) as (first, second),
        logged_in(first) as page,
        browser(second) as elsewhere,
    ):
        elsewhere.cookies = page.client.cookies
        assert (await elsewhere.post("/api/v1/create_session", json=NEW_SESSION, headers=page.csrf)).is_success


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("tml-unknown", 401), ("eyJ.a.token", 401)])
async def test_a_login_without_a_valid_key_leaves_no_cookie(server: TestedServer, key: str | None, status: int) -> None:
    async with browser(server) as client:
        refused = await client.post(SESSION, headers={"X-API-Key": key} if key else {})
    assert (refused.status_code, "set-cookie" in refused.headers) == (status, False)


async def test_a_token_cannot_log_in(server: TestedServer) -> None:
    """A session would make a token that was overheard last for half a day."""
    token = (await server.post("/auth/token")).json()["jwt"]
    async with browser(server) as client:
        refused = await client.post(SESSION, headers={"X-API-Key": token})
    assert (refused.status_code, "set-cookie" in refused.headers) == (422, False)


async def test_only_a_sessions_token_counts_in_a_cookie(server: TestedServer) -> None:
    """A key or a common token there would need no CSRF token."""
    token = (await server.post("/auth/token")).json()["jwt"]
    for value in (API_KEY, token, "eyJ.not.atoken", '"\\777"', "x" * 4000):
        async with browser(server) as client:
            client.headers["Cookie"] = f"tinsmith_console={value}"
            for answer in (
                await client.get("/api/v1/sessions"),
                await client.post("/api/v1/create_session", json=NEW_SESSION),
            ):
                assert answer.status_code == 401


async def test_no_log_line_holds_a_key_or_a_cookie(server: TestedServer, capsys: pytest.CaptureFixture[str]) -> None:
    key = await new_key(server)
    async with logged_in(server, key) as page:
        await page.create_session(**page.csrf)
        secret = page.client.cookies["tinsmith_console"]
    output = "".join(capsys.readouterr())
    assert key not in output
    assert secret not in output


async def test_login_attempts_count_as_requests_of_the_key(tmp_path: Path, fleet: FakeFleet) -> None:
    async with (
        running_server(settings_for(tmp_path, requests_per_minute=2), fleet) as server,
        browser(server) as client,
    ):
        attempts = [await client.post(SESSION, headers={"X-API-Key": API_KEY}) for _ in range(3)]
    assert [one.status_code for one in attempts] == [200, 200, 429]


async def test_without_keys_the_console_needs_no_login(tmp_path: Path, fleet: FakeFleet) -> None:
    open_session = {"tenant": "default", "role": "admin", "key_name": "", "csrf_token": "", "expires_at": None}
    settings = settings_for(tmp_path, require_keys=False, api_key=None)
    async with running_server(settings, fleet) as server, browser(server, "http://localhost:8000") as client:
        client.headers["Cookie"] = "tinsmith_console=eyJ.of.another.server"
        for method, path in (("GET", SESSION), ("POST", SESSION), ("POST", f"{SESSION}/renew")):
            answer = await client.request(method, path)
            assert (answer.status_code, answer.json()) == (200, open_session)
            assert "set-cookie" not in answer.headers
        assert (await client.post("/api/v1/create_session", json=NEW_SESSION)).status_code == 200
        for foreign in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://page.example"}):
            assert (await client.get(SESSION, headers=foreign)).status_code == 403
