"""A server without keys answers this machine alone, whatever address it was really given."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError
from support.server.fake_fleet import BASE_MODEL, FakeFleet
from support.server.http_server import TestedServer, running_server, settings_for

pytestmark = pytest.mark.core


@pytest.fixture
async def server(tmp_path: Path, fleet: FakeFleet) -> AsyncIterator[TestedServer]:
    async with running_server(settings_for(tmp_path, require_keys=False, api_key=None), fleet) as server:
        yield server


def reach(
    server: TestedServer, host: str = "127.0.0.1", peer: str = "127.0.0.1", headers: dict[str, str] | None = None
) -> httpx.AsyncClient:
    """Return a client at `peer` that reaches the server at its address `host`."""
    transport = httpx.ASGITransport(server.app, client=(peer, 4711))
    url = f"http://[{host}]:8000/api/v1" if ":" in host else f"http://{host}:8000/api/v1"
    return httpx.AsyncClient(transport=transport, base_url=url, headers=headers)


@pytest.mark.parametrize(
    ("host", "key"),
    [("127.0.0.1", None), ("127.0.0.1", "tml-anything"), ("localhost", None), ("::1", None), ("::ffff:7f00:1", None)],
)
async def test_a_local_client_is_the_default_tenant(server: TestedServer, host: str, key: str | None) -> None:
    async with reach(server, host, headers={"x-api-key": key} if key else None) as client:
        made = await client.post("/create_model", json={"base_model": BASE_MODEL})
    model = await server.services.models.owned("default", made.json()["model_id"])
    assert model.tenant == "default"


@pytest.mark.parametrize(
    ("host", "peer", "headers", "why"),
    [
        ("192.0.2.1", "192.0.2.7", {}, "an address that other machines can reach"),
        ("192.0.2.1", "192.0.2.1", {}, "an address that other machines can reach"),
        ("127.0.0.1", "192.0.2.7", {}, "an address that other machines can reach"),
        (
            "127.0.0.1",
            "127.0.0.1",
            {"x-forwarded-for": "127.0.0.1"},
            "through a proxy, since it has the header x-forwarded-for",
        ),
        ("127.0.0.1", "127.0.0.1", {"forwarded": "for=127.0.0.1"}, "through a proxy"),
        (
            "127.0.0.1",
            "127.0.0.1",
            {"x-forwarded-port": "443"},
            "through a proxy, since it has the header x-forwarded-port",
        ),
        ("127.0.0.1", "127.0.0.1", {"cf-connecting-ip": "192.0.2.7"}, "through a proxy"),
        ("127.0.0.1", "127.0.0.1", {"host": "rebound.example"}, "another host name"),
        ("127.0.0.1", "127.0.0.1", {"host": "127.0.0.1.example:8000"}, "another host name"),
        ("127.0.0.1", "127.0.0.1", {"origin": "https://page.example"}, "a web page of another site"),
        ("127.0.0.1", "127.0.0.1", {"origin": "null"}, "a web page of another site"),
        ("127.0.0.1", "127.0.0.1", {"sec-fetch-site": "cross-site"}, "a web page of another site"),
    ],
)
async def test_requests_that_may_be_remote_are_refused_in_a_sentence(
    server: TestedServer, host: str, peer: str, headers: dict[str, str], why: str
) -> None:
    async with reach(server, host, peer, {**headers, "x-api-key": "tml-anything"}) as client:
        for path in ("/sessions", "/healthz", f"http://{host}:8000/docs"):
            refused = await client.get(path)
            assert refused.status_code == 403
            assert why in refused.json()["detail"]
            assert "setting require_keys" in refused.json()["detail"]


async def test_a_request_without_a_key_is_refused_if_keys_are_required(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path), fleet) as server, reach(server) as client:
        assert (await client.get("/sessions")).status_code == 401


@pytest.mark.parametrize("changes", [{"host": "0.0.0.0"}, {"host": "gateway"}, {"trusted_proxies": ("127.0.0.1",)}])
def test_settings_that_let_others_in_are_refused_without_keys(tmp_path: Path, changes: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="require_keys: without keys only this machine has access"):
        settings_for(tmp_path, require_keys=False, **changes)


async def test_a_key_of_a_tenant_is_that_tenants(server: TestedServer) -> None:
    secret = (await server.services.keys.create("other", "a test")).secret
    async with reach(server, headers={"x-api-key": secret}) as client:
        made = await client.post("/create_model", json={"base_model": BASE_MODEL})
    assert (await server.services.models.owned("other", made.json()["model_id"])).tenant == "other"
