"""Access to the server's own pages, by client and address."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import API_KEY, TestedServer, running_server, settings_for
from tinsmith_server.routes.http.middleware import pages_are_open
from tinsmith_server.settings import Settings

pytestmark = pytest.mark.core

PAGES = ["/docs", "/docs/swagger-ui-bundle.js", "/docs/start.js", "/openapi.json", "/metrics", "/docs/"]


@asynccontextmanager
async def server_with(folder: Path, fleet: FakeFleet, **settings: Any) -> AsyncIterator[TestedServer]:
    async with running_server(settings_for(folder, **settings), fleet) as server:
        yield server


@pytest.mark.parametrize(
    ("host", "choice", "are_open"),
    [
        ("127.0.0.1", "auto", True),
        ("::1", "auto", True),
        ("localhost", "auto", True),
        ("0.0.0.0", "auto", False),
        ("::", "auto", False),
        ("tinsmith.example.com", "auto", False),
        ("127.0.0.1", "always", False),
        ("0.0.0.0", "never", True),
    ],
)
def test_pages_are_open_where_only_this_machine_can_reach_them(host: str, choice: str, are_open: bool) -> None:
    here = {"server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 4711), "headers": [(b"host", b"localhost:8000")]}
    assert pages_are_open(Settings(host=host, pages_need_key=choice), here) is are_open  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "peer", "headers"),
    [
        ("192.0.2.1", "192.0.2.7", {}),
        ("127.0.0.1", "127.0.0.1", {"x-forwarded-for": "192.0.2.7"}),
        ("127.0.0.1", "127.0.0.1", {"host": "rebound.example"}),
    ],
)
async def test_pages_are_closed_to_remote_peers_even_if_settings_say_that_the_server_is_local(
    tmp_path: Path, fleet: FakeFleet, address: str, peer: str, headers: dict[str, str]
) -> None:
    """Another command than `tinsmith serve` may have given the server another address, and a proxy may stand there."""
    async with server_with(tmp_path, fleet) as server:
        transport = httpx.ASGITransport(server.app, client=(peer, 4711))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{address}:8000", headers=headers) as other:
            assert {(await other.get(page)).status_code for page in PAGES} == {401}


@pytest.mark.parametrize("page", PAGES)
async def test_a_closed_page_needs_a_key_as_clients_or_prometheus_send_it(
    tmp_path: Path, fleet: FakeFleet, page: str
) -> None:
    async with server_with(tmp_path, fleet, host="0.0.0.0") as server:
        for headers in ({"X-API-Key": ""}, {"X-API-Key": "", "Authorization": "Bearer tml-wrong"}):
            refused = await server.client.get(f"http://server{page}", headers=headers)
            assert refused.status_code == 401
            assert "needs a key in" in refused.json()["detail"]
        for headers in ({"X-API-Key": API_KEY}, {"X-API-Key": "", "Authorization": f"Bearer {API_KEY}"}):
            assert (await server.client.get(f"http://server{page}", headers=headers)).status_code in {200, 307}


async def test_doors_and_short_paths_are_where_they_are_below_a_root_path(tmp_path: Path, fleet: FakeFleet) -> None:
    """`uvicorn --root-path /x` puts the root path in front of each path."""
    async with server_with(tmp_path, fleet, host="0.0.0.0", metrics_port=9090) as server:
        transport = httpx.ASGITransport(server.app, root_path="/x")
        async with httpx.AsyncClient(transport=transport, base_url="http://server/x") as other:
            assert {(await other.get(page)).status_code for page in PAGES} == {401}
            assert (await other.get("http://server:9090/x/metrics")).status_code == 200
            assert (await other.get("http://server:9090/x/api/v1/healthz")).status_code == 404
            models = await other.get("/v1/models", headers={"Authorization": f"Bearer {API_KEY}"})
            assert models.json()["object"] == "list"


@pytest.mark.core("GET /api/v1/readyz")
async def test_health_needs_no_key_behind_closed_doors(tmp_path: Path, fleet: FakeFleet) -> None:
    async with server_with(tmp_path, fleet, host="0.0.0.0") as server:
        for path in ("/healthz", "/readyz", "http://server/"):
            assert (await server.client.get(path, headers={"X-API-Key": ""})).status_code == 200


async def test_requests_behind_a_trusted_proxy_are_counted_by_their_sender(tmp_path: Path, fleet: FakeFleet) -> None:
    settings = {"trusted_proxies": ("10.0.0.0/8",), "connections_per_address": 1, "poll_hold_seconds": 0.2}
    async with server_with(tmp_path, fleet, **settings) as server:
        refused = []

        async def inside(client: str) -> None:
            transport = httpx.ASGITransport(server.app, client=(client, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1") as other:
                refused.append(await other.get("/healthz"))

        async def body() -> AsyncIterator[bytes]:
            """Run this while the request is in flight."""
            await inside("127.0.0.1")
            await inside("192.0.2.7")
            yield b"{}"

        await server.client.post("/create_session", content=body())
    assert [answer.status_code for answer in refused] == [429, 200]
    assert refused[0].headers["retry-after"] == "1"
    assert "setting connections_per_address" in refused[0].json()["detail"]


async def test_the_port_of_metrics_serves_metrics_and_nothing_else(tmp_path: Path, fleet: FakeFleet) -> None:
    async with server_with(tmp_path, fleet, host="0.0.0.0", metrics_port=9090) as server:
        headers = {"X-API-Key": ""}
        metrics = await server.client.get("http://server:9090/metrics", headers=headers)
        assert "tinsmith_http_requests_total" in metrics.text
        for path in ("/", "/docs", "/api/v1/healthz", "/api/v1/sessions"):
            refused = await server.client.get(f"http://server:9090{path}", headers={"X-API-Key": API_KEY})
            assert (refused.status_code, refused.json()) == (404, {"detail": "this port serves only /metrics"})
