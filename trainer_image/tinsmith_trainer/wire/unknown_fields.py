"""Requests from an API server of a later release.

A request of a later release may have fields that this worker does not know.

protobuf keeps unknown fields without an error, so the call would run without the effect of these fields. Fields with
the default value are not sent. So an unknown field always asks for some effect.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from tinsmith_rpc import worker_pb2

MESSAGE_OF_KIND: dict[int, type[Message]] = {
    worker_pb2.CREATE_MODEL: worker_pb2.CreateModel,
    worker_pb2.LOAD_MODEL: worker_pb2.LoadWeights,
    worker_pb2.OPTIM_STEP: worker_pb2.OptimStep,
    worker_pb2.SAVE_WEIGHTS: worker_pb2.SaveWeights,
    worker_pb2.LOAD_WEIGHTS: worker_pb2.LoadWeights,
}
"""The messages that are checked, by kind of operation.

A release is not checked, because a release must always end the model. Bodies in the format of the SDK are not checked.
"""


def unknown_fields_of_operation(kind: int, payload: bytes) -> str:
    """Check an operation's payload in the same way as `unknown_fields_of`.

    An unreadable payload passes this check, and fails when the operation runs.
    """
    message = MESSAGE_OF_KIND.get(kind)
    if message is None:
        return ""
    try:
        return unknown_fields_of(message.FromString(payload))
    except DecodeError:
        return ""


def unknown_fields_of(request: Message) -> str:
    """Return why this request cannot have the intended effect. The text is empty if all fields are known."""
    fields = sorted(_unknown_field_names(request))
    if not fields:
        return ""
    return (
        f"This worker's release does not know {', '.join(fields)}, by which the API server, whose release is later, "
        "asks for something that would be left out. Nothing was done. An administrator can restart the worker on the "
        "image of that release; until then, do not ask for it."
    )


def _unknown_field_names(message: Message) -> Iterator[str]:
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        yield f"field {unknown[index].field_number} of {message.DESCRIPTOR.name}"
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        for part in [value] if isinstance(value, Message) else value:
            yield from _unknown_field_names(part)
