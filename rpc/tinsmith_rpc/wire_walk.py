"""Protobuf messages walked on the wire, tag by tag, without building an object.

A parser takes some 50 bytes of memory for a message of two, before anybody can count it. A walk takes none, counts
each tag, and stops at the first one beyond its limit.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, LENGTH_DELIMITED, GROUP, END_OF_GROUP, FIXED32 = range(6)
MAX_VARINT_BYTES = 10
_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}

Field = tuple[int, int, int, int]
"""Number, wire type, and where in the content its value begins and ends."""


class NotProtobuf(ValueError):
    """The content ends in the middle of a field, or holds what is no field."""


class TooManyTags(ValueError):
    """The content has more tags than a walk may pass."""


class Walk:
    """Passes `allowed_tags` tags at most, in all messages that it is asked for together.

    What it finds may allow more, up to `most_tags` in all. A tag takes about a microsecond, so bytes that mean nothing
    would otherwise take seconds.
    """

    def __init__(self, content: bytes, allowed_tags: int, most_tags: int) -> None:
        self.content = content
        self.allowed_tags = min(allowed_tags, most_tags)
        self._most_tags = most_tags
        self._passed_tags = 0

    def allow(self, count: int) -> None:
        """Let the walk pass so many tags more."""
        self.allowed_tags = min(self.allowed_tags + count, self._most_tags)

    def fields(self, begin: int, end: int) -> Iterator[Field]:
        """The fields of the message between these places. Raises NotProtobuf, TooManyTags."""
        content, at = self.content, begin
        while at < end:
            self.pass_tags(1)
            tag = content[at]
            at += 1
            if tag >= 0x80:
                tag, at = self._varint(at - 1, end)
            number, wire_type = tag >> 3, tag & 7
            if not number:
                raise NotProtobuf(f"the field at byte {at} has the number 0")
            value, at = self._value(number, wire_type, at, end)
            yield number, wire_type, value, at

    def number(self, begin: int) -> int:
        """The varint of a field that was walked."""
        return self._varint(begin, len(self.content))[0]

    def pass_tags(self, count: int) -> None:
        """Counts what takes as much memory as `count` tags. Raises TooManyTags."""
        self._passed_tags += count
        if self._passed_tags > self.allowed_tags:
            raise TooManyTags

    def _value(self, number: int, wire_type: int, at: int, end: int) -> tuple[int, int]:
        """Where a value begins, without its length, and where it ends."""
        if wire_type == LENGTH_DELIMITED:
            length, begin = self._varint(at, end)
            stop = begin + length
        elif wire_type == VARINT:
            begin, stop = at, self._varint(at, end)[1]
        elif wire_type == GROUP:
            begin, stop = at, self._end_of_group(number, at, end)
        elif wire_type in _FIXED_BYTES:
            begin, stop = at, at + _FIXED_BYTES[wire_type]
        else:
            raise NotProtobuf(f"the field at byte {at} has the wire type {wire_type}")
        if stop > end:
            raise NotProtobuf(f"the field at byte {at} is cut off")
        return begin, stop

    def _end_of_group(self, number: int, at: int, end: int) -> int:
        """Behind the tag that ends it. Groups in it are passed without recursion, however deep they lie."""
        open_groups = [number]
        while open_groups:
            self.pass_tags(1)
            tag, at = self._varint(at, end)
            if tag & 7 == GROUP:
                open_groups.append(tag >> 3)
            elif tag & 7 == END_OF_GROUP:
                if open_groups.pop() != tag >> 3:
                    raise NotProtobuf(f"the group that ends at byte {at} is another one than was begun")
            else:
                at = self._value(tag >> 3, tag & 7, at, end)[1]
        return at

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        content, value = self.content, 0
        for position in range(at, min(end, at + MAX_VARINT_BYTES)):
            byte = content[position]
            value |= (byte & 0x7F) << 7 * (position - at)
            if byte < 0x80:
                return value, position + 1
        raise NotProtobuf(f"the number at byte {at} is cut off, or has more than {MAX_VARINT_BYTES} bytes")
