"""The conversion of answers to lists and watches into a form that Kopf can read.

An unexpected answer stops Kopf, and thus the operator. Therefore, objects are reduced to a depth that Kopf's parser
accepts. If the API server ends a watch with an error, or no longer knows a kind, this module makes Kopf list again.
Without this module, Kopf lists again only after status 410.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from typing_extensions import override

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.kube.depth import flattened, nests_too_deep, parse_json
from tinsmith_operator.kube.resources import BY_KIND, RECONCILED, namespace_of, parse_call
from tinsmith_operator.logs import get_logger

ListAnswered = Callable[[str | None, str, str, Manifest | None, bool], None]
"""A function that is called for each page of a list. The last page has no continue token."""

EventSeen = Callable[[str, str, Manifest], None]
"""A function that is called for each event of a watch, with the plural of the kind, the type, and the object."""

NOT_FOUND, GONE = 404, 410
UNKNOWN_KIND_SECONDS = 10.0
"""The pause between two attempts to list an unknown kind."""

BEGIN_ANEW = json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": GONE}}).encode()
WATCHED_PLURALS = frozenset(resource.plural for resource in BY_KIND.values())
CHANGES = frozenset({"ADDED", "MODIFIED", "DELETED"})
# The API server writes the type first in each event.
_TYPE_IS_WITHIN = 64

log = get_logger(__name__)


class ListBroken(aiohttp.ClientPayloadError):
    """A failed list that Kopf must repeat. Kopf treats this exception as a broken connection."""

    def __init__(self, status: int) -> None:
        super().__init__(f"The Kubernetes API answered a list with {status}.")
        self.status = status


class WatchedResponse(aiohttp.ClientResponse):
    """A response that Kopf can read. Kopf reads a list by `json`, and a watch by the lines of `content`.

    Kopf gets no objects of the watched kinds, because Kopf would run a task for each object and keep its body. The
    lists that Kopf reads are empty, and each event is a bookmark with the version from which Kopf watches again.

    - `answered`: the status code from the API server.
    - `on_list`, `on_event`: called with the whole lists and with the events.
    """

    answered: int
    on_list: ListAnswered
    on_event: EventSeen
    _listed: str | None = None

    @override
    async def json(self, **options: Any) -> Any:
        parsed = await super().json(**{"loads": parse_json, **options})
        if self._listed is None or not isinstance(parsed, dict) or "items" not in parsed:
            return parsed
        is_first = "continue" not in self.url.query
        self.on_list(namespace_of(self.url.path), self._listed, str(self.answered), parsed, is_first)
        return {**parsed, "items": []}

    @override
    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        started = await super().start(connection)
        self.answered = self.status
        is_watch = self.url.query.get("watch") == "true"
        call = parse_call(self.method, self.url.path, is_watch)
        is_watched = call.resource in WATCHED_PLURALS
        if call.verb == "list" and is_watched:
            self._listed = call.resource
        if not must_begin_anew(self.status, call.verb, call.resource):
            take = self._take if is_watched and is_watch else readable_line
            self.content = _ReadableLines(self.content, take)  # type: ignore[assignment]
        elif is_watch:
            self.status = 200
            self.content = _ReadableLines(_OneLine(BEGIN_ANEW), readable_line)  # type: ignore[assignment]
        else:
            if self.status == NOT_FOUND:
                await asyncio.sleep(UNKNOWN_KIND_SECONDS)
            raise ListBroken(self.answered)
        return started

    def _take(self, line: bytes) -> bytes:
        """Report the event of a line, and return a bookmark in its place. Return other lines in a readable form."""
        try:
            event = parse_json(line)
            type_, body, version = event["type"], event["object"], event["object"]["metadata"]["resourceVersion"]
        except (ValueError, KeyError, TypeError):
            return readable_line(line)
        if type_ not in CHANGES:
            return readable_line(line)
        self.on_event(parse_call(self.method, self.url.path, True).resource, type_, body)
        return json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}}).encode()


def watched_response(on_list: ListAnswered, on_event: EventSeen) -> type[WatchedResponse]:
    """Return a class of responses that report the lists and the events of watched objects."""
    callbacks = {"on_list": staticmethod(on_list), "on_event": staticmethod(on_event)}
    return type("SessionResponse", (WatchedResponse,), callbacks)


def must_begin_anew(status: int, verb: str, plural: str) -> bool:
    """Return whether Kopf must list again, because the watched version is too old or a CRD of the operator was deleted.

    After the deletion of one CRD, the operator continues to serve the other kind. Other errors that Kopf does not retry
    are permanent.
    """
    if verb not in ("list", "watch"):
        return False
    return status == GONE or (status == NOT_FOUND and plural in {resource.plural for resource in RECONCILED})


class _OneLine:
    def __init__(self, line: bytes) -> None:
        self._line = line

    async def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        yield self._line + b"\n"


class _ReadableLines:
    """A stream with an `iter_chunked` that yields whole, readable lines."""

    def __init__(self, stream: Any, take: Callable[[bytes], bytes]) -> None:
        self._stream = stream
        self._take = take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> Any:
        return self._stream.__aiter__()

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield whole lines. At the end, yield the bytes that remain."""
        parts: list[bytes] = []
        async for chunk in self._stream.iter_chunked(size):
            head, newline, rest = chunk.rpartition(b"\n")
            if not newline:
                parts.append(chunk)
                continue
            lines = b"".join([*parts, head]).split(b"\n")
            parts = [rest]
            for line in lines:
                yield self._take(line) + b"\n"
        if last := b"".join(parts):
            yield last


def readable_line(line: bytes) -> bytes:
    """Return one event of a watch in a form that Kopf can read."""
    if b'"ERROR"' in line[:_TYPE_IS_WITHIN]:
        return _error_line(line)
    if not nests_too_deep(line):
        return line
    kept = flattened(line)
    try:
        json.loads(kept)
    except ValueError:
        return line  # Kopf reports it
    return kept


def _error_line(line: bytes) -> bytes:
    try:
        event = parse_json(line)
        is_error = event["type"] == "ERROR"
        status = event.get("object") or {}
        code, message = status.get("code"), status.get("message")
    except (ValueError, KeyError, TypeError, AttributeError):
        return line
    if not is_error or code == GONE:
        return line
    log.warning("watch ended by the API server, listing again", code=code, error=message)
    return BEGIN_ANEW
