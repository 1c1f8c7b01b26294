"""Our copy of the wire messages says what the SDK's own descriptor says."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from tinker.proto import tinker_public_pb2
from tinsmith_rpc import wire_pb2

OURS = wire_pb2.DESCRIPTOR
THEIRS = tinker_public_pb2.DESCRIPTOR

UNUSED_BY_THE_SDK = {"SamplingParams", "StopStrings", "StopTokens"}
"""Sampling requests travel as JSON; these are in the SDK's descriptor all the same."""


def describe_field(field: FieldDescriptor) -> tuple[object, ...]:
    """All that decides a field's bytes on the wire, and whether its absence can be told."""
    target = field.message_type or field.enum_type
    oneof = field.containing_oneof
    # An `optional` field is in a oneof of its own, whose name is a leading underscore and the field's.
    group = oneof.name if oneof and not oneof.name.startswith("_") else None
    return field.number, field.type, field.is_repeated, field.has_presence, target and target.name, group


def describe_message(message: Descriptor) -> dict[str, object]:
    fields: dict[str, object] = {field.name: describe_field(field) for field in message.fields}
    return fields | {entry.name: describe_message(entry) for entry in message.nested_types}


def describe_enum(enum: EnumDescriptor) -> dict[str, int]:
    """Values by short name: only numbers travel, and the SDK writes DTYPE_INT64 where we write INT64."""
    prefixes = {"DType": "DTYPE_", "StopReason": "STOP_REASON_"}
    return {value.name.removeprefix(prefixes[enum.name]): value.number for value in enum.values}


@pytest.mark.parametrize("name", sorted(OURS.message_types_by_name))
def test_a_message_agrees_with_the_sdk_field_by_field(name: str) -> None:
    assert describe_message(OURS.message_types_by_name[name]) == describe_message(THEIRS.message_types_by_name[name])


def test_no_message_that_the_sdk_sends_or_reads_is_missing() -> None:
    assert set(OURS.message_types_by_name) == set(THEIRS.message_types_by_name) - UNUSED_BY_THE_SDK


def test_the_enums_agree_with_the_sdk() -> None:
    ours = {name: describe_enum(enum) for name, enum in OURS.enum_types_by_name.items()}
    theirs = {name: describe_enum(enum) for name, enum in THEIRS.enum_types_by_name.items()}
    assert ours == theirs
