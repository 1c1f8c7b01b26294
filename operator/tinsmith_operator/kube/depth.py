"""Reads what the API server answers, however deep it nests.

Anybody who may write an object of a kind that is watched, a Service say, may write its `metadata.managedFields` too,
up to 10,000 levels deep, and the API server keeps them. Python's parser gives up after some 1,000, or 10,000 in later
versions; then one such object would end every list of its kind, and every watch, for all. And what a parser takes need
not be what those can copy and compare who get it. So what is deeper than any object of Kubernetes is left out.
"""

from __future__ import annotations

import json
import re
from typing import Any

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
