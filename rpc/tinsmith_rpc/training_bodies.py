"""The contents of a training body, learned by walking over it, before anything is built from it.

A body of two bytes a datum would take a hundred times its size once it is parsed. So whoever parses one walks first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tinsmith_rpc import wire_pb2
from tinsmith_rpc.wire_walk import LENGTH_DELIMITED, VARINT, NotProtobuf, TooManyTags, Walk

MAX_DATUMS = 16_384
"""The SDK sends 1,024 at most. A million empty ones fit in two megabytes, and each takes time of the engine."""
MAX_PARTS = 16 * MAX_DATUMS
"""Chunks and tensors of all datums, for the same reason."""
MAX_TAGS = 8 * MAX_PARTS
"""Fields of all messages, and bytes of shapes: a part of the SDK's has three to twelve, and few calls have many parts.
A parser takes some 50 bytes for each, whatever it is."""
TAGS_AT_FIRST = 4096
TAGS_OF_A_DATUM = TAGS_OF_A_PART = 32
"""The tags that a walk may pass: some for a body, and more for each datum and part. Fields of a later SDK fit in.
A body of nothing but unknown fields would take seconds of the engine's thread."""
TOKEN_BYTES = 4
UNCOUNTED_IMAGE_TOKENS = 1024
"""Tokens of an image whose sender does not say how many it has. A picture of 900 x 900 pixels has as many with Qwen."""


class BodyInvalid(ValueError):
    """The message is a sentence for the sender."""


@dataclass(frozen=True, slots=True)
class BodyOutline:
    """`tokens` are the inputs'; of an image as many as its sender takes it for, which the worker holds it to."""

    datums: int
    parts: int
    tokens: int
    forward_only: bool


def outline_of(body: bytes) -> BodyOutline:
    """Raises BodyInvalid for what is no message, and for more than a call may hold, as soon as that is seen."""
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
    """A message's fields that are messages too, by number, and its lists of numbers."""

    messages: Mapping[int, _Kind]
    numbers: frozenset[int]

    @classmethod
    def of(cls, descriptor: Descriptor) -> _Kind:
        """No message of the schema holds one of its own kind."""
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
    """Over all messages of a body, each field once."""

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
        """The last one counts, as for a parser."""
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
        """Count the tags in a field from which nothing is learned."""
        if wire_type != LENGTH_DELIMITED:
            return
        if number in kind.numbers:
            self._walk.pass_tags(end - begin)
        elif (inner := kind.messages.get(number)) is not None:
            for field in self._walk.fields(begin, end):
                self._field(inner, *field)
