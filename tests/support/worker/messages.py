"""Bodies as the SDK sends them, built by hand where the SDK would refuse to, and messages of a later release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message
from tinsmith_rpc import wire_pb2

Values = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]

MessageT = TypeVar("MessageT", bound=Message)


def tensor(values: Values, *, integer: bool) -> wire_pb2.Tensor:
    array = np.asarray(values, dtype="<i8" if integer else "<f4")
    dtype = wire_pb2.INT64 if integer else wire_pb2.FLOAT32
    return wire_pb2.Tensor(dense=array.tobytes(), dtype=dtype, shape=array.shape)


def datum(tokens: Sequence[int], inputs: Mapping[str, Values]) -> wire_pb2.Datum:
    message = wire_pb2.Datum()
    message.model_input.add().encoded_text.tokens = np.asarray(tokens, dtype="<i4").tobytes()
    for name, values in inputs.items():
        message.loss_fn_inputs[name].CopyFrom(tensor(values, integer=name == "target_tokens"))
    return message


def next_token_datum(tokens: Sequence[int], weight: float = 1.0) -> wire_pb2.Datum:
    """Cross-entropy of each token given those before it."""
    return datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": [weight] * (len(tokens) - 1)})


def forward_backward(
    datums: Sequence[wire_pb2.Datum],
    *,
    model_id: str = "s:train:0",
    seq_id: int = 1,
    loss_fn: str = "cross_entropy",
    forward_only: bool = False,
) -> bytes:
    request = wire_pb2.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, data=datums, loss_fn=loss_fn, forward_only=forward_only
    )
    return request.SerializeToString()


def with_a_later_field(message: MessageT, number: int) -> MessageT:
    """Return a copy that also holds field `number`, a varint of 1."""
    tag = number << 3
    encoded = bytes([tag & 0x7F | 0x80, tag >> 7]) if tag > 0x7F else bytes([tag])
    return type(message).FromString(message.SerializeToString() + encoded + b"\x01")
