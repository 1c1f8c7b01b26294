"""Training requests in JSON, which SDKs below 0.22.3 send. The JSON requests become the protobuf message of later SDKs.

Each datum is checked and packed separately, so that other requests run in between.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError
from tinsmith_rpc import wire_pb2

from tinsmith_server.wire.head import Head
from tinsmith_server.wire.ids import operation_number
from tinsmith_server.wire.json_bodies import Shape, pack, sentence
from tinsmith_server.wire.requests import Chunk, Finite, ModelInput, Request, WholeNumbers

MIB = 2**20
# This is the number of values that a protobuf message could contain, where each value has four bytes or more.
NUMBER_BYTES = 4
# The SDK sends 1,024 datums at most, each of some hundred bytes and of some thirty values besides its long lists.
VALUES = 2**18
BYTES_WITHOUT_NUMBERS = 4 * MIB

DTYPES: Mapping[str, tuple[str, wire_pb2.DType.ValueType]] = {
    "float32": ("f", wire_pb2.FLOAT32),
    "int64": ("q", wire_pb2.INT64),
}


def training_shape(limit_bytes: int) -> Shape:
    """Return the limits of a JSON body, if the limit of a protobuf body is `limit_bytes`."""
    return Shape(
        VALUES, bytes_without_numbers=BYTES_WITHOUT_NUMBERS, fractions=True, numbers=limit_bytes // NUMBER_BYTES
    )


class InvalidTraining(ValueError):
    """The request is invalid. The message is for the user."""


def _numbers(value: object) -> Sequence[float]:
    if isinstance(value, array):
        return value
    if not isinstance(value, list) or any(type(item) not in (int, float) for item in value):
        raise PydanticCustomError("numbers", "must be a list of numbers")
    return value


Numbers = Annotated[Sequence[float], PlainValidator(_numbers)]
Size = Annotated[int, Field(ge=0, lt=2**63)]


class JsonTensor(Request):
    """A tensor in JSON. A tensor without a shape has one dimension."""

    data: Numbers
    dtype: Literal["float32", "int64"]
    shape: Annotated[list[Size], Field(fail_fast=True)] | None = None
    sparse_crow_indices: WholeNumbers | None = None
    sparse_col_indices: WholeNumbers | None = None


class JsonDatum(Request):
    model_input: ModelInput
    loss_fn_inputs: dict[str, JsonTensor]


class JsonCall(Request):
    """A call in JSON. Datums are checked one by one."""

    data: list[Any]
    loss_fn: str
    loss_fn_config: dict[str, Finite | str] | None = None


class ForwardBackwardBody(Request):
    """The schema of `/forward_backward` in JSON."""

    model_id: str
    seq_id: int | None = None
    forward_backward_input: JsonCall


class ForwardBody(Request):
    """The schema of `/forward`."""

    model_id: str
    seq_id: int | None = None
    forward_input: JsonCall


def client_number(content: Mapping[str, Any]) -> int | None:
    """Return the number of the operation: 0 if the client leaves it out, None if it is invalid.

    Raises Unprocessable for a number that is not valid for an operation.
    """
    seq_id = content.get("seq_id")
    if seq_id is None:
        return 0
    return operation_number(seq_id) if isinstance(seq_id, int) else None


def json_head(content: Mapping[str, Any], key: str) -> Head | None:
    """Return the head, or None if the body contains no head.

    `key` is the field that contains the call. If the client leaves the number out, it is 0.
    """
    model_id, seq_id, call = content.get("model_id"), client_number(content), content.get(key)
    if not isinstance(model_id, str) or seq_id is None:
        return None
    loss_fn = call.get("loss_fn") if isinstance(call, dict) else None
    return Head(model_id, seq_id, loss_fn if isinstance(loss_fn, str) else None)


def training_message(call: object, *, forward_only: bool) -> wire_pb2.ForwardBackwardRequest:
    """Return the message without its head. Raises InvalidTraining."""
    try:
        checked = JsonCall.model_validate(call)
    except ValidationError as error:
        raise InvalidTraining(sentence(error)) from error
    message = wire_pb2.ForwardBackwardRequest(loss_fn=checked.loss_fn, forward_only=forward_only)
    for name, value in (checked.loss_fn_config or {}).items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        else:
            message.loss_fn_config[name] = value
    for index, datum in enumerate(checked.data):
        _add_datum(message.data.add(), f"datum {index}", datum)
    return message


def _add_datum(message: wire_pb2.Datum, where: str, datum: object) -> None:
    try:
        checked = JsonDatum.model_validate(datum)
        for chunk in checked.model_input.chunks:
            _set_chunk(message.model_input.add(), chunk)
        for name, tensor in checked.loss_fn_inputs.items():
            _set_tensor(message.loss_fn_inputs[name], f"loss_fn_inputs.{name}", tensor)
    except ValidationError as error:
        raise InvalidTraining(f"{where}: {sentence(error)}") from error
    except InvalidTraining as error:
        raise InvalidTraining(f"{where}: {error}") from error


def _set_chunk(message: wire_pb2.Chunk, chunk: Chunk) -> None:
    match chunk.type:
        case "encoded_text":
            message.encoded_text.tokens = _packed("i", chunk.tokens or (), "tokens contain a number outside 32 bits")
        case "image" if chunk.data is not None:
            image = wire_pb2.ImageChunk(data=chunk.data, format=chunk.format, expected_tokens=chunk.expected_tokens)
            message.image.CopyFrom(image)
        case other:
            raise InvalidTraining(f"a chunk of type {other!r}: this server trains on encoded_text and image with data")


def _set_tensor(message: wire_pb2.Tensor, where: str, tensor: JsonTensor) -> None:
    type_code, message.dtype = DTYPES[tensor.dtype]
    message.shape.extend([len(tensor.data)] if tensor.shape is None else tensor.shape)
    values = _packed(type_code, tensor.data, f"{where} contains a number that is not {tensor.dtype}")
    if tensor.sparse_crow_indices is None or tensor.sparse_col_indices is None:
        message.dense = values
        return
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = pack("q", tensor.sparse_crow_indices)
    message.sparse_csr.col_indices = pack("q", tensor.sparse_col_indices)


def _packed(type_code: str, numbers: Sequence[float], otherwise: str) -> bytes:
    try:
        return pack(type_code, numbers)
    except (OverflowError, TypeError):
        raise InvalidTraining(otherwise) from None
