"""From a training request in JSON, as SDKs below 0.22 send it, to what the worker's journal keeps.

The worker sees the message that an SDK of today would have sent. What is wrong with a body becomes a rejection, once it
says whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import Unprocessable
from tinsmith_server.services.failures import rejection
from tinsmith_server.wire.ids import operation_number
from tinsmith_server.wire.json_training import InvalidTraining, json_head, training_message

CallKey = Literal["forward_backward_input", "forward_input"]
"""Where the data stand in a body."""


@dataclass(frozen=True, slots=True)
class JsonOperation:
    """The operation as the worker is given it, but for the epoch."""

    request: worker_pb2.SubmitRequest
    loss_fn: str | None


def json_operation(content: dict[str, Any], key: CallKey, limit_bytes: int) -> JsonOperation:
    """Raises Unprocessable where the body does not say which operation it is."""
    head = json_head(content, key)
    if head is None:
        raise Unprocessable("model_id and seq_id are needed to know which operation this is")
    request = worker_pb2.SubmitRequest(
        model_id=head.model_id, seq_id=operation_number(head.seq_id), kind=worker_pb2.FORWARD_BACKWARD
    )
    try:
        request.payload = _payload(content.get(key), key, limit_bytes)
    except InvalidTraining as error:
        request.rejection.CopyFrom(rejection(str(error)))
    return JsonOperation(request, head.loss_fn)


def _payload(call: object, key: CallKey, limit_bytes: int) -> bytes:
    """Raises InvalidTraining."""
    message = training_message(call, forward_only=key == "forward_input")
    if (size := message.ByteSize()) > limit_bytes:
        raise InvalidTraining(
            f"the data take {size} bytes, over the limit of {limit_bytes} (setting max_body_bytes); "
            "send fewer datums in a call"
        )
    return message.SerializeToString()
