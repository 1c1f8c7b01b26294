"""A parser for the API server's answers. The parser drops objects and lists that are nested too deeply.

A user who may write a Service, for example, may also write up to 10,000 nested levels into `metadata.managedFields`.
The API server stores objects with 10,000 levels. Python's parser fails at 1,000 levels, or at 10,000 in later versions.
With Python's parser, one object with too many levels would end every list and watch of its kind. Code that copies or
compares nested objects fails at even fewer levels. Therefore the parser drops everything below the deepest level of a
normal Kubernetes object.
"""

from __future__ import annotations

import json
import re
from typing import Any

DEEPEST = 100
"""The deepest level that is kept. Normal Kubernetes objects have fewer than 30 levels, including the managed fields."""

# A string without an end extends to the end of the text. No text is matched twice, so the time is linear.
_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_STRINGS_AND_BRACKETS = re.compile(_STRINGS.pattern + rb"|[{}\[\]]", re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_AS_OBJECTS = bytes.maketrans(b"[]", b"{}")
_OPENING, _EMPTY = (b"{", b"["), {b"{": b"{}", b"[": b"[]"}


def parse_json(text: str | bytes) -> Any:
    """Parse JSON, and drop the parts that are nested too deeply. Raises ValueError."""
    answer = text.encode() if isinstance(text, str) else text
    return json.loads(flattened(answer) if nests_too_deep(answer) else answer)


def nests_too_deep(text: bytes) -> bool:
    """Return whether the text is nested too deeply. Also return True for text with brackets that do not match."""
    if text.count(b"{") + text.count(b"[") < DEEPEST:
        return False
    brackets = _STRINGS.sub(b"", text).translate(_AS_OBJECTS, _NO_BRACKETS)
    for _ in range(DEEPEST - 1):
        if not brackets:
            return False
        brackets = brackets.replace(b"{}", b"")  # the innermost level
    return bool(brackets)


def flattened(text: bytes) -> bytes:
    """Return the text with empty objects and lists at the deepest level that remains."""
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
