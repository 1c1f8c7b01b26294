"""The answers to lists and watches, as Kopf can read them.

Kopf ends with its first answer that it does not expect, and the operator with it. So whatever an object may hold is cut
to a depth that its parser takes; and a watch that the API server breaks off with an error, of whatever code, or a kind
that it does not know any more, makes Kopf begin anew with a list, which is what it does by itself for 410 alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from typing_extensions import override

from tinsmith_operator.kube.depth import flattened, nests_too_deep, parse_json
from tinsmith_operator.kube.resources import OWNERS, parse_call
from tinsmith_operator.logs import get_logger

NOT_FOUND, GONE = 404, 410
UNKNOWN_KIND_SECONDS = 10.0
"""The pause between two lists of a kind that the cluster does not know."""

BEGIN_ANEW = json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": GONE}}).encode()
# The API server writes the type of an event first.
_TYPE_IS_WITHIN = 64

log = get_logger(__name__)


class ListBroken(aiohttp.ClientPayloadError):
    """A list that has to begin anew. Kopf takes it for a connection that broke."""

    def __init__(self, status: int) -> None:
        super().__init__(f"The Kubernetes API answered a list with {status}.")
        self.status = status


class WatchedResponse(aiohttp.ClientResponse):
    """A response as Kopf reads it: a list by `json`, a watch by `content`, line for line.

    answered: the status code that was sent.
    """

    answered: int

    @override
    async def json(self, **options: Any) -> Any:
        return await super().json(**{"loads": parse_json, **options})

    @override
    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        started = await super().start(connection)
        self.answered = self.status
        is_watch = self.url.query.get("watch") == "true"
        call = parse_call(self.method, self.url.path, is_watch)
        if not must_begin_anew(self.status, call.verb, call.resource):
            self.content = _ReadableLines(self.content)  # type: ignore[assignment]
        elif is_watch:
            self.status = 200
            self.content = _ReadableLines(_OneLine(BEGIN_ANEW))  # type: ignore[assignment]
        else:
            if self.status == NOT_FOUND:
                await asyncio.sleep(UNKNOWN_KIND_SECONDS)
            raise ListBroken(self.answered)
        return started


def must_begin_anew(status: int, verb: str, plural: str) -> bool:
    """Whether an answer is no reason to end: the version to go on from is too old, or one of our own CRDs was deleted,
    in which case the other kind is still served. Everything else that Kopf does not retry would stay so.
    """
    if verb not in ("list", "watch"):
        return False
    return status == GONE or (status == NOT_FOUND and plural in {resource.plural for resource in OWNERS})


class _OneLine:
    def __init__(self, line: bytes) -> None:
        self._line = line

    async def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        yield self._line + b"\n"


class _ReadableLines:
    """A stream as it is, but for `iter_chunked`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> Any:
        return self._stream.__aiter__()

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Whole lines, and at the end what is left."""
        parts: list[bytes] = []
        async for chunk in self._stream.iter_chunked(size):
            head, newline, rest = chunk.rpartition(b"\n")
            if not newline:
                parts.append(chunk)
                continue
            lines = b"".join([*parts, head]).split(b"\n")
            parts = [rest]
            for line in lines:
                yield readable_line(line) + b"\n"
        if last := b"".join(parts):
            yield last


def readable_line(line: bytes) -> bytes:
    """Return one event of a watch as Kopf can take it."""
    if b'"ERROR"' in line[:_TYPE_IS_WITHIN]:
        return _error_line(line)
    if not nests_too_deep(line):
        return line
    kept = flattened(line)
    try:
        json.loads(kept)
    except ValueError:
        return line  # for the reader to tell
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
    log.warning("a watch was broken off and begins anew with a list", code=code, error=message)
    return BEGIN_ANEW
