"""Messages as a later release sends them: with fields that this one does not have."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)


def with_a_later_field(message: MessageT, number: int) -> MessageT:
    """A copy that also holds field `number`, a varint of 1."""
    tag = number << 3
    encoded = bytes([tag & 0x7F | 0x80, tag >> 7]) if tag > 0x7F else bytes([tag])
    return type(message).FromString(message.SerializeToString() + encoded + b"\x01")
