"""Reads what the API server answers, however deep it nests.

Anybody who may write an object of a kind that is watched, a Service say, may write its `metadata.managedFields` too,
up to 10,000 levels deep, and the API server keeps them. Python's parser gives up after some 1,000, or 10,000 in later
versions; then one such object would end every list of its kind, and every watch, for all. So what is deeper than any
object of Kubernetes is left out of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from typing_extensions import override

DEEPEST = 100
"""Kubernetes' own objects and their managed fields stay below 30."""

# A line of a watch with fewer brackets nests less than the parser goes: most have so few.
FEW_BRACKETS = 500

_STRINGS_AND_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]')
_OPENING, _EMPTY = (b"{", b"["), {b"{": b"{}", b"[": b"[]"}


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, without what nests too deep. Raises ValueError for what is no JSON."""
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(flattened(text.encode() if isinstance(text, str) else text))


def flattened(text: bytes) -> bytes:
    """With nothing in the objects and lists at the deepest level that is kept."""
    kept, depth, begins = bytearray(), 0, 0
    for token in _STRINGS_AND_BRACKETS.finditer(text):
        bracket = token[0]
        if bracket in _OPENING:
            depth += 1
            if depth == DEEPEST:
                kept += text[begins : token.start()] + _EMPTY[bracket]
        elif not bracket.startswith(b'"'):
            if depth == DEEPEST:
                begins = token.end()
            depth -= 1
    return bytes(kept + text[begins:])


class ReadableResponse(aiohttp.ClientResponse):
    """What Kopf reads, with a parser of its own: a list by `json`, a watch by `content`, line for line."""

    @override
    async def json(self, **options: Any) -> Any:
        return await super().json(**{"loads": parse_json, **options})

    @override
    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        started = await super().start(connection)
        self.content = _ReadableLines(self.content)  # type: ignore[assignment]
        return started


class _ReadableLines:
    """A stream as it is, but for `iter_chunked`."""

    def __init__(self, stream: aiohttp.StreamReader) -> None:
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
                yield _readable(line) + b"\n"
        if last := b"".join(parts):
            yield last


def _readable(line: bytes) -> bytes:
    if line.count(b"{") + line.count(b"[") < FEW_BRACKETS:
        return line
    try:
        json.loads(line)
    except RecursionError:
        return flattened(line)
    except ValueError:
        pass  # for the reader to tell
    return line
