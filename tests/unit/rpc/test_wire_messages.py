"""The copy of the wire messages agrees with the SDK's own descriptor."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from tinker.proto import tinker_public_pb2
from tinsmith_rpc import wire_pb2

COPY = wire_pb2.DESCRIPTOR
SDK = tinker_public_pb2.DESCRIPTOR

UNUSED_BY_THE_SDK = {"SamplingParams", "StopStrings", "StopTokens"}
"""Messages of the SDK's descriptor that it does not send: sampling requests travel as JSON."""


def describe_field(field: FieldDescriptor) -> tuple[object, ...]:
    """Return everything that determines a field's bytes on the wire, and whether its absence is visible."""
    target = field.message_type or field.enum_type
    oneof = field.containing_oneof
    # An `optional` field is in a oneof of its own, whose name is a leading underscore and the field's.
    group = oneof.name if oneof and not oneof.name.startswith("_") else None
    return field.number, field.type, field.is_repeated, field.has_presence, target and target.name, group


def describe_message(message: Descriptor) -> dict[str, object]:
    fields: dict[str, object] = {field.name: describe_field(field) for field in message.fields}
    return fields | {entry.name: describe_message(entry) for entry in message.nested_types}


def describe_enum(enum: EnumDescriptor) -> dict[str, int]:
    """Return values by short name. Only numbers travel; the SDK writes DTYPE_INT64 for INT64."""
    prefixes = {"DType": "DTYPE_", "StopReason": "STOP_REASON_"}
    return {value.name.removeprefix(prefixes[enum.name]): value.number for value in enum.values}


@pytest.mark.parametrize("name", sorted(COPY.message_types_by_name))
def test_a_message_agrees_with_the_sdk_field_by_field(name: str) -> None:
    assert describe_message(COPY.message_types_by_name[name]) == describe_message(SDK.message_types_by_name[name])


def test_no_message_that_the_sdk_sends_or_reads_is_missing() -> None:
    assert set(COPY.message_types_by_name) == set(SDK.message_types_by_name) - UNUSED_BY_THE_SDK


def test_the_enums_agree_with_the_sdk() -> None:
    copied = {name: describe_enum(enum) for name, enum in COPY.enum_types_by_name.items()}
    original = {name: describe_enum(enum) for name, enum in SDK.enum_types_by_name.items()}
    assert copied == original
