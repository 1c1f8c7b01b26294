"""The outline of a training body: the number of datums, parts and tokens.

The outline is read from the protobuf wire format without building objects. A parser takes about 50 bytes of memory for
each message of 2 bytes, before anything can be counted. This module does not need the memory of a parser. This module
counts each tag, and stops at the first tag beyond the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tinsmith_rpc import wire_pb2

VARINT, FIXED64, LENGTH_DELIMITED, GROUP, END_OF_GROUP, FIXED32 = range(6)
MAX_VARINT_BYTES = 10
_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}

Field = tuple[int, int, int, int]
"""A field: its number, its wire type, and the positions at which its value begins and ends."""


class NotProtobuf(ValueError):
    """An error for content that ends in the middle of a field, or contains an invalid field."""


class TooManyTags(ValueError):
    """An error for content that has more tags than the walk may pass."""


class Walk:
    """A walk over messages that passes at most `allowed_tags` tags in total.

    While content is found, `allow` raises the limit, up to `most_tags`. The limit is necessary because a tag takes
    about a microsecond, so meaningless bytes could take seconds.
    """

    def __init__(self, content: bytes, allowed_tags: int, most_tags: int) -> None:
        self.content = content
        self.allowed_tags = min(allowed_tags, most_tags)
        self._most_tags = most_tags
        self._passed_tags = 0

    def allow(self, count: int) -> None:
        """Raise the limit by this number of tags."""
        self.allowed_tags = min(self.allowed_tags + count, self._most_tags)

    def fields(self, begin: int, end: int) -> Iterator[Field]:
        """Yield the fields of the message between two positions. Raises NotProtobuf and TooManyTags."""
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
        """Return the varint of a field."""
        return self._varint(begin, len(self.content))[0]

    def pass_tags(self, count: int) -> None:
        """Count an item that takes as much memory as `count` tags. Raises TooManyTags."""
        self._passed_tags += count
        if self._passed_tags > self.allowed_tags:
            raise TooManyTags

    def _value(self, number: int, wire_type: int, at: int, end: int) -> tuple[int, int]:
        """Return the positions at which the value begins and ends. The length prefix is not part of the value."""
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
        """Return the position after the end tag of the group. Nested groups are skipped without recursion."""
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


MAX_DATUMS = 16_384
"""The limit on datums. The SDK sends at most 1,024.

Without this limit, a million empty datums would fit in two megabytes, and each datum costs the engine time.
"""
MAX_PARTS = 16 * MAX_DATUMS
"""The limit on chunks and tensors in all datums together, because each part costs the engine time."""
MAX_TAGS = 8 * MAX_PARTS
"""The limit on fields in all messages, and on bytes in shapes.

In the SDK's bodies, a part has three to twelve tags, and few calls have many parts. A parser takes about 50 bytes of
memory for each tag.
"""
TAGS_AT_FIRST = 4096
TAGS_OF_A_DATUM = TAGS_OF_A_PART = 32
"""The number of tags that are allowed for each datum and each part. The number leaves room for fields of later SDKs.

Without this limit, a body of unknown fields would take seconds of the engine's thread.
"""
TOKEN_BYTES = 4
UNCOUNTED_IMAGE_TOKENS = 1024
"""The number of tokens for an image if the sender does not give a number.

The default is the number for an image of 900 x 900 pixels with Qwen.
"""


class BodyInvalid(ValueError):
    """An error for an invalid body. The message is for the sender."""


@dataclass(frozen=True, slots=True)
class BodyOutline:
    """The outline of a training body. `tokens` is the number of input tokens.

    For an image, `tokens` includes the number that the sender gave. The sender's number for an image is verified later.
    """

    datums: int
    parts: int
    tokens: int
    forward_only: bool


def outline_of(body: bytes) -> BodyOutline:
    """Return the outline. Raises BodyInvalid as soon as content is invalid or a limit is exceeded."""
    walk = _BodyWalk(body)
    try:
        walk.request()
    except NotProtobuf as error:
        raise BodyInvalid(f"The forward_backward body is not a readable protobuf message: {error}.") from None
    except TooManyTags:
        raise BodyInvalid(
            f"The body holds more than {walk.allowed_tags} fields, the most for its number of datums ({walk.datums}), "
            f"chunks and tensors ({walk.parts}). Send fewer datums, or leave out fields that are not the protocol's."
        ) from None
    return BodyOutline(walk.datums, walk.parts, walk.text_bytes // TOKEN_BYTES + walk.image_tokens, walk.forward_only)


@dataclass(frozen=True, slots=True)
class _Kind:
    """The nested messages and the number lists of a message type, by field number."""

    messages: Mapping[int, _Kind]
    numbers: frozenset[int]

    @classmethod
    def of(cls, descriptor: Descriptor) -> _Kind:
        """Return the `_Kind` of a message type. No message of the schema contains its own type."""
        fields: list[FieldDescriptor] = list(descriptor.fields)
        messages = {each.number: cls.of(each.message_type) for each in fields if each.message_type is not None}
        return cls(messages, frozenset(each.number for each in fields if each.is_packed))


_REQUEST = _Kind.of(wire_pb2.ForwardBackwardRequest.DESCRIPTOR)
_DATA = wire_pb2.ForwardBackwardRequest.DATA_FIELD_NUMBER
_FORWARD_ONLY = wire_pb2.ForwardBackwardRequest.FORWARD_ONLY_FIELD_NUMBER
_CHUNKS = wire_pb2.Datum.MODEL_INPUT_FIELD_NUMBER
_PARTS = (_CHUNKS, wire_pb2.Datum.LOSS_FN_INPUTS_FIELD_NUMBER)
_TEXT = wire_pb2.Chunk.ENCODED_TEXT_FIELD_NUMBER
_TOKENS = wire_pb2.EncodedTextChunk.TOKENS_FIELD_NUMBER
_IMAGE = wire_pb2.Chunk.IMAGE_FIELD_NUMBER
_EXPECTED_TOKENS = wire_pb2.ImageChunk.EXPECTED_TOKENS_FIELD_NUMBER


class _BodyWalk:
    """A walk over all messages of a body. The walk reads each field once."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._walk = Walk(body, TAGS_AT_FIRST, MAX_TAGS)
        self.datums = 0
        self.parts = 0
        self.text_bytes = 0
        self.image_tokens = 0
        self.forward_only = False

    @property
    def allowed_tags(self) -> int:
        return self._walk.allowed_tags

    def request(self) -> None:
        for number, wire_type, begin, end in self._walk.fields(0, len(self._body)):
            if number == _DATA and wire_type == LENGTH_DELIMITED:
                self._datum(_REQUEST.messages[_DATA], begin, end)
            elif number == _FORWARD_ONLY and wire_type == VARINT:
                self.forward_only = self._walk.number(begin) != 0
            else:
                self._field(_REQUEST, number, wire_type, begin, end)

    def _datum(self, kind: _Kind, begin: int, end: int) -> None:
        self.datums += 1
        if self.datums > MAX_DATUMS:
            raise BodyInvalid(
                f"The body holds more than {MAX_DATUMS} datums; one forward_backward takes at most that. Send several."
            )
        self._walk.allow(TAGS_OF_A_DATUM)
        for number, wire_type, value, stop in self._walk.fields(begin, end):
            if number in _PARTS and wire_type == LENGTH_DELIMITED:
                self._count_part()
            if number == _CHUNKS and wire_type == LENGTH_DELIMITED:
                self._chunk(kind.messages[_CHUNKS], value, stop)
            else:
                self._field(kind, number, wire_type, value, stop)

    def _count_part(self) -> None:
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise BodyInvalid(
                f"The body holds more than {MAX_PARTS} chunks and tensors; one forward_backward takes at most that. "
                "Join the chunks of a datum, or send fewer datums."
            )
        self._walk.allow(TAGS_OF_A_PART)

    def _chunk(self, kind: _Kind, begin: int, end: int) -> None:
        for number, wire_type, value, stop in self._walk.fields(begin, end):
            if number == _TEXT and wire_type == LENGTH_DELIMITED:
                self.text_bytes += self._tokens_bytes(value, stop)
            elif number == _IMAGE and wire_type == LENGTH_DELIMITED:
                self.image_tokens += self._tokens_of_image(kind.messages[_IMAGE], value, stop)
            else:
                self._field(kind, number, wire_type, value, stop)

    def _tokens_bytes(self, begin: int, end: int) -> int:
        """Return the size of the tokens in bytes.

        If the field is repeated, the last value counts, as it does in a parser.
        """
        found = 0
        for number, wire_type, value, stop in self._walk.fields(begin, end):
            if number == _TOKENS and wire_type == LENGTH_DELIMITED:
                found = stop - value
        return found

    def _tokens_of_image(self, kind: _Kind, begin: int, end: int) -> int:
        expected = 0
        for number, wire_type, value, stop in self._walk.fields(begin, end):
            if number == _EXPECTED_TOKENS and wire_type == VARINT:
                expected = self._walk.number(value)
            else:
                self._field(kind, number, wire_type, value, stop)
        return expected if 0 < expected < 2**31 else UNCOUNTED_IMAGE_TOKENS

    def _field(self, kind: _Kind, number: int, wire_type: int, begin: int, end: int) -> None:
        """Count the tags in a field, and ignore its content."""
        if wire_type != LENGTH_DELIMITED:
            return
        if number in kind.numbers:
            self._walk.pass_tags(end - begin)
        elif (inner := kind.messages.get(number)) is not None:
            for field in self._walk.fields(begin, end):
                self._field(inner, *field)
