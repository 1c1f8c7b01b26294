"""The manual: exactly the files of the site, with a policy for its own scripts, and with a key like /docs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import API_KEY, TestedServer, running_server, settings_for
from tinsmith_server.routes import package_folders

pytestmark = pytest.mark.core

SCRIPT = 'document.body.dataset.theme = "auto";'
FILES = {
    "index.html": f"<!DOCTYPE html><title>Tinsmith</title><script>{SCRIPT}</script>",
    "how-to/chart.html": "<!DOCTYPE html><title>Chart</title>",
    "_static/search.js": "search();",
    "_images/curve.png": "png",
}


@pytest.fixture
async def server(tmp_path: Path, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TestedServer]:
    for name, content in FILES.items():
        (file := tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    (tmp_path / "secret.html").write_text("not of the site")
    monkeypatch.setattr(package_folders, "SITE", tmp_path / "site")
    async with running_server(settings_for(tmp_path / "data", pages_need_key="always"), fleet) as server:
        yield server


async def fetched(server: TestedServer, path: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://server") as client:
        return await client.get(path, headers=headers)


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/manual/", "text/html; charset=utf-8"),
        ("/manual/how-to/chart.html", "text/html; charset=utf-8"),
        ("/manual/_static/search.js", "text/javascript; charset=utf-8"),
        ("/manual/_images/curve.png", "image/png"),
    ],
)
async def test_a_file_needs_a_key_where_the_page_of_calls_needs_one(
    server: TestedServer, path: str, media_type: str
) -> None:
    assert (await fetched(server, path)).status_code == (await fetched(server, "/docs")).status_code == 401
    answer = await fetched(server, path, **{"X-API-Key": API_KEY})
    assert answer.text == FILES[path.removeprefix("/manual/") or "index.html"]
    assert answer.headers["content-type"] == media_type
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")


async def test_pages_may_run_only_the_scripts_of_the_site_and_load_nothing_from_elsewhere(server: TestedServer) -> None:
    answer = await fetched(server, "/manual/how-to/chart.html", **{"X-API-Key": API_KEY})
    parts = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert (parts["default-src"], parts["script-src"]) == ("'none'", f"'self' 'sha256-{digest}'")
    assert {source for sources in parts.values() for source in sources.split()} == {
        "'none'", "'self'", "'unsafe-inline'", "data:", f"'sha256-{digest}'",
    }  # fmt: skip
    assert "'unsafe-inline'" in parts["style-src"]


@pytest.mark.parametrize(
    "path",
    [
        "/manual/missing.html",
        "/manual/how-to/",
        "/manual/../secret.html",
        "/manual/..%2fsecret.html",
        "/manual/how-to/..%2f..%2fsecret.html",
        "/manual//etc/passwd",
        "/manual/%00",
        "/manual/index.html/",
    ],
)
async def test_no_path_reaches_anything_else(server: TestedServer, path: str) -> None:
    answer = await fetched(server, path, **{"X-API-Key": API_KEY})
    assert answer.status_code == 404
    assert "not of the site" not in answer.text


async def test_a_browser_is_led_to_the_folder_by_a_relative_address(server: TestedServer) -> None:
    led = await fetched(server, "/manual", **{"X-API-Key": API_KEY})
    assert (led.status_code, led.headers["location"]) == (307, "manual/")


async def test_an_installation_without_a_manual_says_how_to_build_it(
    tmp_path: Path, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package_folders, "SITE", tmp_path / "nothing")
    async with running_server(settings_for(tmp_path), fleet) as server:
        answer = await fetched(server, "/manual/", **{"X-API-Key": API_KEY})
        assert (answer.status_code, "make docs-site" in answer.json()["detail"]) == (404, True)
