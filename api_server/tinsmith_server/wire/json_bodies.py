"""A JSON reader that never blocks the process for long, whatever a body contains.

The reader counts the parts of a body before it builds anything. The reader reads long lists of numbers (prompts and
tensors) and long texts (images) in slices. No other code runs during one call of `orjson` or CPython. One call for a
prompt of megabytes would block the process for a tenth of a second. The rest of the content is small.
"""

from __future__ import annotations

import binascii
import re
import uuid
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import orjson
from pydantic import ValidationError

# A slice takes some 0.4 ms.
SLICE_BYTES = 64 * 1024
# Shorter lists are not read in slices. Their numbers count as values.
LONG_LIST_BYTES = 64
# This is the same limit for texts. The end of a text's key is checked backwards from the text's begin.
LONG_TEXT_BYTES = 16 * 1024
_BEFORE_LONG_TEXT = re.compile(rb'"data"\s{0,4}:\s{0,4}\Z')
_KEY_BYTES = 16

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_WHOLE_NUMBERS = re.compile(rb"[0-9,\-\s]*+")
_NUMBERS = re.compile(rb"[0-9,\-\s.eE+]*+")
_BIG_ENDIAN: Final = array("H", [1]).tobytes() == b"\0\1"
_SEPARATORS = re.compile(rb"[\[\]{},]")


Numbers: TypeAlias = "array[int] | array[float]"
LongPart: TypeAlias = "Numbers | bytes"


class BadJson(ValueError):
    """The body is invalid. The message is for the sender."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The limits on the content of a body."""

    values: int = 2048
    depth: int = 16
    # If this is set, lists of whole numbers may have any length and are read as `array`s. Texts without escapes under
    # "data" are read as `bytes`. All other content has at most this size.
    bytes_without_numbers: int | None = None
    # If True, lists of other numbers may also have any length, and are read as arrays of doubles.
    fractions: bool = False
    # The limit for all long lists together. Each number takes eight bytes.
    numbers: int | None = None

    @property
    def numbers_pattern(self) -> re.Pattern[bytes]:
        return _NUMBERS if self.fractions else _WHOLE_NUMBERS


PLAIN = Shape()
PROMPT = Shape(values=8192, bytes_without_numbers=512 * 1024)
# The limits for a custom loss. Its nodes and arguments have further limits of their own.
GRAPH = Shape(values=16384, depth=24)


def read_object(body: bytes, shape: Shape = PLAIN) -> dict[str, Any]:
    """Return the JSON object.

    Raises BadJson if the body is no JSON object, or if the content is over the limits of `shape`.
    """
    taken_out: dict[str, LongPart] = {}
    if shape.bytes_without_numbers is not None:
        body, taken_out = _without_long_parts(body, shape)
    _check_shape(body, shape)
    content = _loads(body)
    if not isinstance(content, dict):
        raise BadJson("the body must be a JSON object")
    return _with_long_parts(content, taken_out) if taken_out else content


def _loads(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadJson(f"the body is not JSON: {error}") from error


# ---- counting


def _check_shape(body: bytes, shape: Shape) -> None:
    if body.count(b",") + _openings(body) > shape.values or _openings(body) > shape.depth:
        # The count may include separators inside texts, because texts may contain any characters.
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
            raise BadJson(f"the body's lists and objects are nested more than {shape.depth} deep")


def _too_many(shape: Shape) -> str:
    suffix = " besides its long lists of whole numbers" if shape.bytes_without_numbers is not None else ""
    return f"the body contains more than {shape.values} values{suffix}; send less in one request"


# ---- long lists of whole numbers, and long texts


def _without_long_parts(body: bytes, shape: Shape) -> tuple[bytes, dict[str, LongPart]]:
    """Replace each long list or text in the body by a name. Return the new body, and the long parts by name."""
    mark, rest, taken_out, done, numbers = uuid.uuid4().hex, bytearray(), dict[str, LongPart](), 0, 0
    for start, end in _long_parts(body, shape):
        name = f"{mark}-{len(taken_out)}"
        if body[end : end + 1] == b"]":
            taken_out[name] = found = _read_numbers(body, start, end, shape, numbers)
            numbers += len(found)
        else:
            taken_out[name] = body[start:end]
        rest += body[done : start - 1] + b'"' + name.encode() + b'"'
        done = end + 1
    assert shape.bytes_without_numbers is not None
    if len(rest) + len(body) - done > shape.bytes_without_numbers:
        raise BadJson(
            f"the body has more than {shape.bytes_without_numbers} bytes besides its lists of whole numbers; lists of "
            "tokens must contain whole numbers only"
        )
    return bytes(rest) + body[done:] if taken_out else body, taken_out


def _long_parts(body: bytes, shape: Shape) -> Iterator[tuple[int, int]]:
    """Yield the start and end positions of each long part.

    The number of steps is at most the limit on values in the body.
    """
    at, string, steps = 0, body.find(b'"'), 0
    while (steps := steps + 1) <= shape.values:
        opening = body.find(b"[", at, string if string >= 0 else len(body))
        if opening >= 0:
            at = _end_of_numbers(body, opening + 1, shape.numbers_pattern)
            if at - opening > LONG_LIST_BYTES and body[at : at + 1] == b"]":
                yield opening + 1, at
            continue
        if string < 0:
            return
        if (end := _end_of_long_text(body, string)) >= 0:
            yield string + 1, end
            at = end + 1
        else:
            at = _end_of_string(body, string, shape)
        string = body.find(b'"', at)
    raise BadJson(_too_many(shape))


def _end_of_long_text(body: bytes, start: int) -> int:
    """Return the position at which a long text ends.

    Return -1 if the text is short, or if its key does not allow a long text.
    """
    if not _BEFORE_LONG_TEXT.search(body, max(0, start - _KEY_BYTES), start):
        return -1
    end = body.find(b'"', start + 1)
    is_plain = end - start > LONG_TEXT_BYTES and body.find(b"\\", start, end) < 0
    return end if is_plain else -1


def _end_of_string(body: bytes, start: int, shape: Shape) -> int:
    assert shape.bytes_without_numbers is not None
    found = _STRING.match(body, start, start + shape.bytes_without_numbers)
    if found is None:
        raise BadJson(f"the body is not JSON, or contains a text of more than {shape.bytes_without_numbers} bytes")
    return found.end()


def _end_of_numbers(body: bytes, start: int, pattern: re.Pattern[bytes]) -> int:
    end = start
    while True:
        found = pattern.match(body, end, end + SLICE_BYTES)
        assert found is not None  # the pattern also matches an empty text
        if found.end() < end + SLICE_BYTES:
            return found.end()
        end = found.end()


def _read_numbers(body: bytes, start: int, end: int, shape: Shape, read_before: int) -> Numbers:
    numbers: Numbers = array("q")
    for piece in _slices(body, start, end):
        values = _loads(b"[" + piece + b"]")
        if not values and len(piece) < end - start:
            raise BadJson("the body is not JSON: a list of numbers has a comma too many")
        numbers = _with_more(numbers, values, shape)
        if shape.numbers is not None and read_before + len(numbers) > shape.numbers:
            raise BadJson(f"the body contains more than {shape.numbers} numbers; send less in one request")
    return numbers


def _with_more(numbers: Numbers, values: list[Any], shape: Shape) -> Numbers:
    try:
        numbers.extend(array(numbers.typecode, values))
    except (OverflowError, TypeError):
        if not shape.fractions or not any(isinstance(value, float) for value in values):
            raise BadJson("a list contains a whole number outside 64 bits") from None
        # This is reached at the first number that is not whole.
        return _as_doubles(numbers, values)
    return numbers


def _as_doubles(numbers: Numbers, values: list[Any]) -> array[float]:
    doubles = array("d")
    for start in range(0, len(numbers), SLICE_BYTES // 8):
        doubles.extend(array("d", numbers[start : start + SLICE_BYTES // 8].tolist()))
    doubles.extend(array("d", values))
    return doubles


def _slices(body: bytes, start: int, end: int) -> Iterator[bytes]:
    """Yield slices of the list. The list is cut at commas, which are left out."""
    while end - start > SLICE_BYTES:
        comma = body.rfind(b",", start, start + SLICE_BYTES)
        if comma < 0:
            raise BadJson(f"a list of numbers has {SLICE_BYTES} bytes without a comma")
        yield body[start:comma]
        start = comma + 1
    yield body[start:end]


def _with_long_parts(value: Any, taken_out: dict[str, LongPart]) -> Any:
    """Put the long parts back, but only as deep as the shape allows."""
    match value:
        case str():
            return taken_out.get(value, value)
        case dict():
            return {key: _with_long_parts(item, taken_out) for key, item in value.items()}
        case list():
            return [_with_long_parts(item, taken_out) for item in value]
    return value


def decode_base64(text: bytes) -> bytes:
    """Return the decoded bytes. The text is decoded in slices. Raises ValueError."""
    return b"".join(
        binascii.a2b_base64(text[start : start + SLICE_BYTES], strict_mode=True)
        for start in range(0, len(text), SLICE_BYTES)
    )


def pack(type_code: str, numbers: Sequence[float]) -> bytes:
    """Return the numbers in little-endian form. The numbers are packed in slices.

    Raises OverflowError if a number does not fit the type, and TypeError for a fraction if the type is an integer.
    """
    packed: Numbers = array(type_code)
    step = SLICE_BYTES // 4
    for start in range(0, len(numbers), step):
        # The array is built from a list. From another array, CPython copies each number separately, which takes four
        # times as long.
        packed.extend(array(type_code, list[Any](numbers[start : start + step])))
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


ERRORS_SHOWN = 3


def sentence(error: ValidationError) -> str:
    """Return a sentence for the sender about the error in a body."""
    found = error.errors(include_url=False, include_context=False)
    shown = [_problem(item["loc"], item["msg"], item["type"], item["input"]) for item in found[:ERRORS_SHOWN]]
    more = len(found) - len(shown)
    return "; ".join([*shown, f"and {more} more"] if more else shown)


def _problem(location: tuple[int | str, ...], message: str, kind: str, value: object) -> str:
    where = _cut(".".join(str(part) for part in location))
    text = _cut(message.removeprefix("Value error, ").rstrip("."))
    if kind == "value_error":
        return text
    if value is None and kind != "missing":
        return f"{where}: {text}; it arrived as null, which is also how the SDK sends NaN and infinity"
    shown = repr(value) if isinstance(value, str | int | float) else ""
    return f"{where}: {text}, not {shown}" if shown and kind != "missing" and len(shown) <= 80 else f"{where}: {text}"


def _cut(text: str) -> str:
    """Shorten a text. Names and messages may contain text of any length from the sender."""
    return text if len(text) <= 300 else f"{text[:300]}…"
