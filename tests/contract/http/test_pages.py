"""Pages for a browser: they load nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from support.server.http_server import TestedServer, one_server
from tinsmith_server.routes.pages import DOCS_PATHS, prefers_html
from typing_extensions import override

pytestmark = pytest.mark.core

CHROMIUM = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Page(HTMLParser):
    """The addresses that a page loads, its inline scripts and its inline styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.handlers: list[str] = []
        self.inline: dict[str, str] = {}
        self._inside = ""
        self.feed(text)

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.handlers += [name for name in found if name.startswith("on") or name == "style"]
        if address := found.get(LOADING.get(tag, "")):
            self.loaded.append(address)
        elif tag in {"script", "style"}:
            self._inside = tag

    @override
    def handle_data(self, data: str) -> None:
        if self._inside:
            self.inline[self._inside] = data
            self._inside = ""


async def opened(server: TestedServer, path: str, **headers: str) -> httpx.Response:
    return await server.client.get(f"http://localhost:8471{path}", headers={"Accept": CHROMIUM, **headers})


def policy_of(answer: httpx.Response) -> dict[str, str]:
    parts = (part.strip().partition(" ") for part in answer.headers["content-security-policy"].split(";"))
    return {name: value for name, _, value in parts}


@one_server
async def test_the_page_of_calls_loads_only_files_of_this_server(server: TestedServer) -> None:
    answer = await opened(server, "/docs")
    page = Page(answer.text)
    assert len(page.loaded) == 4
    for address in page.loaded:
        where = urljoin("http://localhost:8471/docs", address)
        assert urlsplit(where).netloc == "localhost:8471"
        served = await opened(server, urlsplit(where).path)
        assert (served.status_code, len(served.content) > 100) == (200, True), address
        assert served.headers["x-content-type-options"] == "nosniff"
        assert urlsplit(where).path in DOCS_PATHS, "it needs a key where the page does"
    assert (page.inline, page.handlers) == ({}, [])


@one_server
async def test_the_page_of_calls_may_load_nothing_from_elsewhere(server: TestedServer) -> None:
    answer = await opened(server, "/docs")
    policy = policy_of(answer)
    assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == ("'none'", "'self'", "'self'")
    assert not re.search(r"https?://", answer.headers["content-security-policy"] + answer.text)
    start = (await opened(server, "/docs/start.js")).text
    assert 'validatorUrl: "none"' in start
    assert not re.search(r"https?://", start)
    style = (await opened(server, "/docs/swagger-ui.css")).text
    assert {urlsplit(address).scheme for address in re.findall(r"url\([\"']?([^\"')]+)", style)} <= {"data", ""}
    assert "@import" not in style


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (CHROMIUM, True),
        ("text/html", True),
        ("TEXT/HTML; charset=utf-8", True),
        ("application/json;q=0.5, text/html", True),
        ("*/*", False),
        ("", False),
        ("application/json", False),
        ("text/html;q=0, */*", False),
        ("text/html, application/json", False),
        ("text/html;q=0.5, application/json", False),
        ("text/html;q=nonsense", False),
        (";,;;,q=1", False),
    ],
)
def test_a_page_is_for_a_client_that_prefers_one(accept: str, html: bool) -> None:
    assert prefers_html(accept) is html
