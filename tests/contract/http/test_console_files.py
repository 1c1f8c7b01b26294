"""The console's files: exactly those of the package, with headers that keep other sites and other scripts out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import TestedServer, running_server, settings_for
from tinsmith_server.routes import package_folders

pytestmark = pytest.mark.core

CHROMIUM = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
FILES = {
    "index.html": "<!DOCTYPE html><title>Tinsmith</title>",
    "assets/index-D1g3sT0f.js": "export {};",
    "assets/style-a1B2c3D4.css": "body {}",
    "LICENSES.txt": "of the packages",
}


@pytest.fixture
async def server(tmp_path: Path, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TestedServer]:
    for name, content in FILES.items():
        (file := tmp_path / "bundle" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (tmp_path / "secret.html").write_text("not of the bundle")
    monkeypatch.setattr(package_folders, "BUNDLE", tmp_path / "bundle")
    async with running_server(settings_for(tmp_path / "data"), fleet) as server:
        yield server


async def fetched(server: TestedServer, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://server") as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.parametrize(
    ("path", "media_type", "caching"),
    [
        ("/console/", "text/html; charset=utf-8", "no-cache"),
        ("/console/index.html", "text/html; charset=utf-8", "no-cache"),
        ("/console/LICENSES.txt", "text/plain; charset=utf-8", "no-cache"),
        ("/console/assets/index-D1g3sT0f.js", "text/javascript; charset=utf-8", "public, max-age=31536000, immutable"),
        ("/console/assets/style-a1B2c3D4.css", "text/css; charset=utf-8", "public, max-age=31536000, immutable"),
    ],
)
async def test_a_file_needs_no_key_and_has_strict_headers(
    server: TestedServer, path: str, media_type: str, caching: str
) -> None:
    answer = await fetched(server, path)
    assert answer.text == FILES[path.removeprefix("/console/") or "index.html"]
    assert (answer.headers["content-type"], answer.headers["cache-control"]) == (media_type, caching)
    policy = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    assert answer.headers["content-security-policy"] == policy
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    headed = await fetched(server, path, "HEAD")
    assert (headed.status_code, headed.content, headed.headers["content-type"]) == (200, b"", media_type)


@pytest.mark.parametrize(
    "path",
    [
        "/console/missing.js",
        "/console/assets",
        "/console/assets/",
        "/console/../secret.html",
        "/console/..%2fsecret.html",
        "/console/%2e%2e/secret.html",
        "/console/assets/..%2f..%2fsecret.html",
        "/console/..%5csecret.html",
        "/console//etc/passwd",
        "/console/%00",
        "/console/index.html/",
        "/console/INDEX.HTML",
    ],
)
async def test_no_path_reaches_anything_else(server: TestedServer, path: str) -> None:
    answer = await fetched(server, path)
    assert answer.status_code == 404
    assert "not of the bundle" not in answer.text


async def test_a_browser_is_led_to_the_console_by_relative_addresses(server: TestedServer) -> None:
    for path in ("/", "/console"):
        led = await fetched(server, path, Accept=CHROMIUM, Host="other.example")
        assert (led.status_code, led.headers["location"]) == (307, "console/")
    assert (await fetched(server, "/", Accept=CHROMIUM)).headers["vary"] == "Accept"
    assert (await fetched(server, "/", "HEAD", Accept=CHROMIUM)).headers["location"] == "console/"


async def test_an_installation_without_the_files_says_so(
    tmp_path: Path, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_folders, "BUNDLE", tmp_path / "nothing")
    async with running_server(settings_for(tmp_path), fleet) as server:
        answer = await fetched(server, "/console/")
        assert (answer.status_code, "no console" in answer.json()["detail"]) == (404, True)
