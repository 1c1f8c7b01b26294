"""Reads JSON without ever holding up whoever else runs in the process, whatever the body is made of.

What a body is made of is counted before anything is built from it. Long lists of whole numbers, which prompts are,
are read in slices: `orjson` and CPython let nobody else run during one call, and a prompt of megabytes in one call is
a tenth of a second of silence for everybody. What is left is small.
"""

from __future__ import annotations

import re
import uuid
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

# Some 0.4 ms each.
SLICE_BYTES = 64 * 1024
# Shorter lists are left where they are: their numbers count as values.
LONG_LIST_BYTES = 64

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NUMBERS = re.compile(rb"[0-9,\-\s]*+")
_BIG_ENDIAN: Final = array("H", [1]).tobytes() == b"\0\1"
_SEPARATORS = re.compile(rb"[\[\]{},]")


class BadJson(ValueError):
    """The message is for the sender."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a body may be made of."""

    values: int = 2048
    depth: int = 16
    # With it, lists of whole numbers may be of any length and come as `array`s; the rest has this size at most.
    bytes_beside_numbers: int | None = None


PLAIN = Shape()
PROMPT = Shape(values=8192, bytes_beside_numbers=512 * 1024)


def read_object(body: bytes, shape: Shape = PLAIN) -> dict[str, Any]:
    """Raises BadJson for anything but a JSON object within `shape`."""
    numbers: dict[str, array[int]] = {}
    if shape.bytes_beside_numbers is not None:
        body, numbers = _without_long_lists(body, shape)
    _check_shape(body, shape)
    content = _loads(body)
    if not isinstance(content, dict):
        raise BadJson("the body must be a JSON object")
    return _with_lists(content, numbers) if numbers else content


def _loads(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadJson(f"the body is not JSON: {error}") from error


# ---- counting


def _check_shape(body: bytes, shape: Shape) -> None:
    if body.count(b",") + _openings(body) > shape.values or _openings(body) > shape.depth:
        # Perhaps only inside of text, which may hold anything.
        _check_separators(_STRING.sub(b'""', body), shape)


def _openings(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _check_separators(body: bytes, shape: Shape) -> None:
    if body.count(b",") + _openings(body) > shape.values:
        raise BadJson(_too_many(shape))
    depth = 0
    for separator in _SEPARATORS.finditer(body):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(separator[0], 0)
        if depth > shape.depth:
            raise BadJson(f"the body's lists and objects lie more than {shape.depth} deep in each other")


def _too_many(shape: Shape) -> str:
    beside = " beside its long lists of whole numbers" if shape.bytes_beside_numbers is not None else ""
    return f"the body holds more than {shape.values} values{beside}; send less in one request"


# ---- long lists of whole numbers


def _without_long_lists(body: bytes, shape: Shape) -> tuple[bytes, dict[str, array[int]]]:
    """The body with a name in the place of each long list, and the lists by their names."""
    mark, rest, numbers, done = uuid.uuid4().hex, bytearray(), dict[str, "array[int]"](), 0
    for start, end in _long_lists(body, shape):
        name = f"{mark}-{len(numbers)}"
        numbers[name] = _read_numbers(body, start, end)
        rest += body[done : start - 1] + b'"' + name.encode() + b'"'
        done = end + 1
    assert shape.bytes_beside_numbers is not None
    if len(rest) + len(body) - done > shape.bytes_beside_numbers:
        raise BadJson(
            f"the body has more than {shape.bytes_beside_numbers} bytes beside its lists of whole numbers; "
            "lists of tokens hold whole numbers only"
        )
    return bytes(rest) + body[done:] if numbers else body, numbers


def _long_lists(body: bytes, shape: Shape) -> Iterator[tuple[int, int]]:
    """Where the contents of each begin and end. In as many steps as the body may have values."""
    at, string, steps = 0, body.find(b'"'), 0
    while (steps := steps + 1) <= shape.values:
        opening = body.find(b"[", at, string if string >= 0 else len(body))
        if opening >= 0:
            at = _end_of_numbers(body, opening + 1)
            if at - opening > LONG_LIST_BYTES and body[at : at + 1] == b"]":
                yield opening + 1, at
            continue
        if string < 0:
            return
        at = _end_of_string(body, string, shape)
        string = body.find(b'"', at)
    raise BadJson(_too_many(shape))


def _end_of_string(body: bytes, start: int, shape: Shape) -> int:
    assert shape.bytes_beside_numbers is not None
    found = _STRING.match(body, start, start + shape.bytes_beside_numbers)
    if found is None:
        raise BadJson(f"the body is not JSON, or holds a text of more than {shape.bytes_beside_numbers} bytes")
    return found.end()


def _end_of_numbers(body: bytes, start: int) -> int:
    end = start
    while True:
        found = _NUMBERS.match(body, end, end + SLICE_BYTES)
        assert found is not None  # it matches nothing, too
        if found.end() < end + SLICE_BYTES:
            return found.end()
        end = found.end()


def _read_numbers(body: bytes, start: int, end: int) -> array[int]:
    numbers = array("q")
    for piece in _slices(body, start, end):
        values = _loads(b"[" + piece + b"]")
        if not values and len(piece) < end - start:
            raise BadJson("the body is not JSON: a list of numbers has a comma too many")
        try:
            numbers.extend(array("q", values))
        except (OverflowError, TypeError):
            raise BadJson("a list of whole numbers holds one outside 64 bits") from None
    return numbers


def _slices(body: bytes, start: int, end: int) -> Iterator[bytes]:
    """Cut at commas, which are left out."""
    while end - start > SLICE_BYTES:
        comma = body.rfind(b",", start, start + SLICE_BYTES)
        if comma < 0:
            raise BadJson(f"a list of whole numbers has {SLICE_BYTES} bytes without a comma")
        yield body[start:comma]
        start = comma + 1
    yield body[start:end]


def _with_lists(value: Any, numbers: dict[str, array[int]]) -> Any:
    """No deeper than the shape allows."""
    match value:
        case str():
            return numbers.get(value, value)
        case dict():
            return {key: _with_lists(item, numbers) for key, item in value.items()}
        case list():
            return [_with_lists(item, numbers) for item in value]
    return value


def pack(type_code: str, numbers: Sequence[int]) -> bytes:
    """Little-endian, in slices. Raises OverflowError if a number does not fit its type."""
    packed = array(type_code)
    step = SLICE_BYTES // 4
    for start in range(0, len(numbers), step):
        # By a list: from another array CPython takes one number after the other, at four times the cost.
        packed.extend(array(type_code, list(numbers[start : start + step])))
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()
