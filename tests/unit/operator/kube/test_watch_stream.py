"""The answers that Kopf reads, and those after which it lists again instead of ending."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tinsmith_operator.kube.watch_stream as streams
import tinsmith_operator.runtime.handlers as doors
import yaml
from aiohttp import ClientSession, web
from tinsmith_operator.installation import Scope
from tinsmith_operator.kube.resources import OWNERS, POOLS, SESSIONS, ApiCall, Resource, parse_call
from tinsmith_operator.kube.watch_stream import (
    BEGIN_ANEW,
    WatchedResponse,
    must_begin_anew,
    readable_line,
    watched_response,
)
from tinsmith_operator.runtime.handlers import Watch

NESTED = '{"f:a":' * 9000 + "{}" + "}" * 9000
NEIGHBOUR = {"text": 'a "quoted" \\ { [ ]', "kept": [1, {"two": None}], "ü": True}


def with_neighbours(nested: str) -> str:
    return json.dumps({"before": NEIGHBOUR, "deep": "?", "after": NEIGHBOUR}).replace('"?"', nested)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Yield the address of an API server whose watch has a deep object between two others, the last truncated."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.Response(text=with_neighbours(NESTED), content_type="application/json")
        response = web.StreamResponse()
        await response.prepare(request)
        for line in (json.dumps(NEIGHBOUR), with_neighbours(NESTED), "{" * 600, json.dumps(NEIGHBOUR)):
            await response.write(line[:7].encode())
            await response.write(line[7:].encode() + b"\n")
        await response.write(b'{"cut":')
        return response

    application = web.Application()
    application.router.add_get("/", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


async def test_a_response_can_be_read_by_a_parser_of_little_depth(address: str) -> None:
    async with ClientSession(response_class=WatchedResponse) as http:
        async with http.get(address) as response:
            assert (await response.json())["after"] == NEIGHBOUR
        async with http.get(f"{address}?watch=true") as response:
            whole = b"".join([chunk async for chunk in response.content.iter_chunked(1024)])
    first, deep, wrong, last, cut = whole.decode().split("\n")
    assert json.loads(first) == json.loads(last) == NEIGHBOUR
    assert json.loads(deep)["after"] == NEIGHBOUR
    assert (wrong, cut) == ("{" * 600, '{"cut":')


@pytest.fixture
async def listing_address() -> AsyncIterator[str]:
    """Yield the address of an API server with one Service and one foreign object."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"a": "b"}]})

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize(("path", "items"), [("/api/v1/services", 0), ("/api/v1/namespaces", 1)])
async def test_kopf_gets_no_objects_of_a_list_that_the_informer_reads(
    listing_address: str, path: str, items: int
) -> None:
    heard: list[Any] = []
    response_class = watched_response(lambda *page: heard.append(page), lambda *_: None)
    async with ClientSession(response_class=response_class) as http, http.get(listing_address + path) as response:
        listed = await response.json()
    assert listed["metadata"] == {"resourceVersion": "7", "continue": "more"}
    assert len(listed["items"]) == items
    assert [len(page[3]["items"]) for page in heard] == [1] * (1 - items)


SERVICE = {"kind": "Service", "metadata": {"name": "tiny", "uid": "u1", "resourceVersion": "8"}, "spec": {"a": 1}}


@pytest.fixture
async def watching_address() -> AsyncIterator[str]:
    """Yield the address of an API server with an event, a bookmark, an error and an unknown line in each watch."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}
        lines = [json.dumps({"type": "ADDED", "object": SERVICE}), json.dumps(bookmark), "not JSON"]
        await response.write("".join(f"{line}\n" for line in lines).encode() + error_event(410) + b"\n")
        return response

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_an_event_is_reported_and_kopf_gets_a_bookmark_in_its_place(watching_address: str) -> None:
    heard: list[Any] = []
    response_class = watched_response(lambda *_: None, lambda *event: heard.append(event))
    url = f"{watching_address}/api/v1/services?watch=true"
    async with ClientSession(response_class=response_class) as http, http.get(url) as response:
        whole = b"".join([chunk async for chunk in response.content.iter_chunked(1024)])
    first, bookmark, wrong, error = whole.rstrip().split(b"\n")
    assert heard == [("services", "ADDED", SERVICE)]
    assert json.loads(first) == {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "8"}}}
    assert json.loads(bookmark)["object"]["metadata"]["resourceVersion"] == "9"
    assert (wrong, error) == (b"not JSON", error_event(410))


# ---- errors that the API server tells in a watch


def error_event(code: int, **event: Any) -> bytes:
    status = {"kind": "Status", "status": "Failure", "code": code, "message": "etcdserver: request timed out"}
    return json.dumps({"type": "ERROR", "object": status, **event}).encode()


@pytest.mark.parametrize("code", [400, 403, 404, 429, 500, 503, 504])
def test_every_error_restarts_a_watch_like_an_expired_version(code: int) -> None:
    assert readable_line(error_event(code)) == BEGIN_ANEW
    assert json.loads(BEGIN_ANEW)["object"]["code"] == 410
    assert readable_line(error_event(410)) == error_event(410)


def test_an_event_about_an_object_with_any_content_stays() -> None:
    named = json.dumps({"type": "ADDED", "object": {"metadata": {"name": "x", "labels": {"a": "ERROR"}}}}).encode()
    tricky = json.dumps({"object": {"type": "ERROR"}, "type": "ADDED"}).encode()
    for line in (named, tricky, b'{"type":"ERROR"', b'"ERROR"'):
        assert readable_line(line) == line


@pytest.mark.parametrize(
    ("status", "verb", "plural", "begins_anew"),
    [
        (404, "list", "trainingsessions", True),
        (404, "watch", "samplerpools", True),
        (404, "list", "rayclusters", False),
        (404, "get", "discovery", False),
        (410, "list", "services", True),
        (410, "watch", "rayclusters", True),
        (409, "watch", "trainingsessions", False),
        (200, "list", "trainingsessions", False),
    ],
)
def test_only_a_version_that_is_too_old_and_a_missing_crd_make_a_watch_begin_again(
    status: int, verb: str, plural: str, begins_anew: bool
) -> None:
    assert must_begin_anew(status, verb, plural) is begins_anew


# ---- Kopf itself, over a small API server


class SmallApi:
    """Lists and watches of sessions and pools. missing: plurals whose CRD is deleted.

    sent: queued lines, one list a watch of sessions. lists: counts the answered lists.
    """

    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.lines: asyncio.Queue[bytes] = asyncio.Queue()
        self.api_calls: asyncio.Queue[ApiCall] = asyncio.Queue()
        self.stop = asyncio.Event()
        self.cut = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.strip("/")
        if path in DISCOVERY:
            return web.json_response(DISCOVERY[path])
        call = parse_call(request.method, request.path, "watch" in request.query)
        self.api_calls.put_nowait(call)
        if call.resource in self.missing:
            return web.json_response({"kind": "Status", "code": 404}, status=404)
        if call.verb == "list":
            return web.json_response({"items": [], "metadata": {"resourceVersion": "7"}})
        return await self._watch(request, call)

    async def _watch(self, request: web.Request, call: ApiCall) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        cut = asyncio.create_task(self.cut.wait())
        line = asyncio.create_task(self.lines.get()) if call.resource == SESSIONS.plural else cut
        await asyncio.wait([cut, line], return_when=asyncio.FIRST_COMPLETED)
        if line is not cut and line.done():
            await response.write(line.result() + b"\n")
        line.cancel()
        cut.cancel()
        return response


def discovered_resource(resource: Resource | None, plural: str, kind: str) -> dict[str, Any]:
    namespaced = resource is not None
    return {"name": plural, "kind": kind, "singularName": "", "namespaced": namespaced, "verbs": ["list", "watch"]}


def group(name: str, version: str) -> dict[str, Any]:
    return {"name": name, "versions": [{"version": version}], "preferredVersion": {"version": version}}


DISCOVERY: dict[str, Any] = {
    "api": {"versions": ["v1"]},
    "api/v1": {"resources": [discovered_resource(None, "namespaces", "Namespace")]},
    "apis": {"groups": [group("apiextensions.k8s.io", "v1"), group(SESSIONS.group, SESSIONS.version)]},
    "apis/apiextensions.k8s.io/v1": {
        "resources": [discovered_resource(None, "customresourcedefinitions", "CustomResourceDefinition")]
    },
    f"apis/{SESSIONS.api_version}": {
        "resources": [discovered_resource(owner, owner.plural, owner.kind) for owner in OWNERS]
    },
}


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SmallApi]:
    api, application = SmallApi(), web.Application()
    application.router.add_get("/{path:.*}", api.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {"clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {"token": "t"}}]}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump({**config, "current-context": "c"}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(streams, "UNKNOWN_KIND_SECONDS", 0.01)
    monkeypatch.setattr(doors, "RECONNECT_SECONDS", 0.01)
    yield api
    await runner.cleanup()


class Watching:
    """A watch of both kinds. heard: each list that it reported, as (plural, status code)."""

    def __init__(self, api: SmallApi) -> None:
        self.api = api
        self.results: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.watch = Watch(Scope(("tin",)), lambda *_: None, self._hear, lambda *_: None, no_turn, OWNERS)
        self.running = asyncio.create_task(self.watch.run())

    def _hear(self, _namespace: str | None, plural: str, code: str, _answer: object, _is_first: bool) -> None:
        self.results.put_nowait((plural, code))

    async def hears(self, *answers: tuple[str, str]) -> None:
        """Wait until all of these have arrived, in any order. Fails when the watch ends before."""
        left = list(answers)
        while left:
            next_one = asyncio.create_task(self.results.get())
            await asyncio.wait([next_one, self.running], return_when=asyncio.FIRST_COMPLETED)
            if self.running.done():
                self.running.result()
            if next_one.result() in left:
                left.remove(next_one.result())

    async def asks(self, *calls: ApiCall) -> None:
        """Wait until all of these were requested, in any order."""
        left = list(calls)
        while left:
            call = await self.api.api_calls.get()
            if call in left:
                left.remove(call)


async def no_turn() -> None:
    """Return at once: nothing else uses the rate limit."""


@pytest.fixture
async def watching(api: SmallApi) -> AsyncIterator[Watching]:
    watching = Watching(api)
    await watching.asks(*(ApiCall("watch", owner.plural, None) for owner in OWNERS))
    yield watching
    api.cut.set()
    await watching.watch.stop()
    watching.running.cancel()
    await asyncio.gather(watching.running, return_exceptions=True)


@pytest.mark.parametrize("code", [500, 504])
async def test_a_watch_that_is_broken_off_by_an_error_begins_again_with_a_list(watching: Watching, code: int) -> None:
    await watching.hears((SESSIONS.plural, "200"))
    watching.api.lines.put_nowait(error_event(code))
    await watching.hears((SESSIONS.plural, "200"))
    assert not watching.watch.has_ended


async def test_a_kind_with_a_deleted_crd_is_reported_and_watched_again_when_the_crd_is_back(watching: Watching) -> None:
    await watching.hears(*((owner.plural, "200") for owner in OWNERS))
    watching.api.missing = {SESSIONS.plural}
    watching.api.lines.put_nowait(error_event(500))
    await watching.hears((SESSIONS.plural, "404"))
    watching.api.missing = set()
    await watching.hears((SESSIONS.plural, "200"))
    await watching.asks(ApiCall("watch", SESSIONS.plural, None))
    assert not watching.watch.has_ended


async def test_a_watch_that_finds_its_crd_deleted_lists_it(watching: Watching) -> None:
    watching.api.missing = {POOLS.plural}
    watching.api.cut.set()
    await watching.hears((POOLS.plural, "404"))
    assert not watching.watch.has_ended
