"""Reads what the API server answers, however deep it nests.

Anybody who may write an object of a kind that is watched, a Service say, may write its `metadata.managedFields` too,
up to 10,000 levels deep, and the API server keeps them. Python's parser gives up after some 1,000, or 10,000 in later
versions; then one such object would end every list of its kind, and every watch, for all. And what a parser takes need
not be what those can copy and compare who get it. So what is deeper than any object of Kubernetes is left out.
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

# One without an end goes to the end of the text, and nothing is tried twice: the time is linear whatever comes.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_STRINGS_AND_BRACKETS = re.compile(_STRINGS.pattern + rb"|[{}\[\]]", re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_AS_OBJECTS = bytes.maketrans(b"[]", b"{}")
_OPENING, _EMPTY = (b"{", b"["), {b"{": b"{}", b"[": b"[]"}


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, without what nests too deep. Raises ValueError for what is no JSON."""
    answer = text.encode() if isinstance(text, str) else text
    return json.loads(flattened(answer) if nests_too_deep(answer) else answer)


def nests_too_deep(text: bytes) -> bool:
    """Whether something stands below the deepest level that is kept; of brackets that do not match, True."""
    if text.count(b"{") + text.count(b"[") < DEEPEST:
        return False
    brackets = _STRINGS.sub(b"", text).translate(_AS_OBJECTS, _NO_BRACKETS)
    for _ in range(DEEPEST - 1):
        if not brackets:
            return False
        brackets = brackets.replace(b"{}", b"")  # the innermost level
    return bool(brackets)


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
    if not nests_too_deep(line):
        return line
    kept = flattened(line)
    try:
        json.loads(kept)
    except ValueError:
        return line  # for the reader to tell
    return kept
