"""The conversion of Tinker's protobuf bodies to checked datums, and of results to protobuf.

Decoding refuses invalid training examples before an engine sees them, with a UserError that names the datum and the
field. The engine checks the properties that depend on the model: vocabulary, length, loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tinsmith_rpc import wire_pb2
from tinsmith_rpc.training_bodies import BodyInvalid, outline_of
from tinsmith_rpc.zstd_frames import FrameInvalid, declared_bytes, unpack

from tinsmith_trainer.engines.base import Datum, LossSpec, Outcome
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.torch_model.base_model import Image
from tinsmith_trainer.wire.tensors import array_of, decode_tensor, dense_bytes

MAX_BODY_BYTES = 512 * 1024 * 1024
"""The limit on the size of a body, and on the size of the body's sparse tensors after decoding.

A sparse tensor of a hundred bytes may become half a gigabyte.
"""


@dataclass(frozen=True, slots=True)
class OpenedBody:
    """A forward_backward message after the check of the limits and before decoding."""

    content: bytes
    forward_only: bool


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A forward_backward or forward call after decoding."""

    datums: tuple[Datum, ...]
    loss: LossSpec
    forward_only: bool


def open_body(body: bytes, *, zstd: bool) -> OpenedBody:
    """Check the size of a body before the body is decoded. Raises UserError."""
    content = _unpacked(body) if zstd else body
    try:
        return OpenedBody(content, outline_of(content).forward_only)
    except BodyInvalid as error:
        raise UserError(str(error)) from None


def decode_forward_backward(body: OpenedBody) -> ForwardBackward:
    """Decode the body. Raises UserError with the datum and the field if a field is invalid."""
    request = wire_pb2.ForwardBackwardRequest()
    try:
        request.ParseFromString(body.content)
    except DecodeError:
        raise UserError("The forward_backward body is not a readable protobuf message.") from None
    if not request.data:
        raise UserError("forward_backward needs at least one datum; data is empty.")
    _check_dense_bytes(request)
    datums = tuple(_decode_datum(index, datum) for index, datum in enumerate(request.data))
    return ForwardBackward(datums, LossSpec(request.loss_fn, _loss_config(request)), request.forward_only)


def _check_dense_bytes(request: wire_pb2.ForwardBackwardRequest) -> None:
    """Refuse sparse tensors that would take too much memory after decoding."""
    unpacked = sum(dense_bytes(tensor) for datum in request.data for tensor in datum.loss_fn_inputs.values())
    if unpacked > MAX_BODY_BYTES:
        raise UserError(
            f"The sparse tensors of the body would take {unpacked} bytes as dense ones; one forward_backward takes "
            f"{MAX_BODY_BYTES}. Send fewer datums."
        )


def _unpacked(frame: bytes) -> bytes:
    try:
        size = declared_bytes(frame)
        if size is None:  # the API server unpacks such frames, since it knows the size limit of a body
            raise UserError("The forward_backward body is a zstd frame that does not declare its size.")
        if size > MAX_BODY_BYTES:
            raise UserError(
                f"The forward_backward body is over {MAX_BODY_BYTES} bytes once unpacked. Send fewer datums in a call."
            )
        return unpack(frame, size)
    except FrameInvalid as error:
        raise UserError(f"The forward_backward body is not a readable zstd frame: {error}.") from None


def _loss_config(request: wire_pb2.ForwardBackwardRequest) -> dict[str, float | str]:
    # Strings appear only in v2; numbers appear in both maps.
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        config[key] = value.text if value.WhichOneof("value") == "text" else value.number
    for key, number in config.items():
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"loss_fn_config[{key!r}] is {number}; it must be a finite number.")
    return config


def _decode_datum(index: int, datum: wire_pb2.Datum) -> Datum:
    where = f"datum {index}"
    tokens, images = _decode_input(where, datum.model_input)
    inputs = {
        name: decode_tensor(f"{where}, loss_fn_inputs[{name!r}]", tensor)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    if "target_tokens" in inputs:
        if inputs["target_tokens"].dtype != np.int64:
            raise UserError(f"{where}, loss_fn_inputs['target_tokens'] holds floats; it must be int64.")
        inputs["target_tokens"] = inputs["target_tokens"].reshape(inputs["target_tokens"].shape or 1)
    return Datum(tokens, inputs, images)


def _decode_input(where: str, chunks: Iterable[wire_pb2.Chunk]) -> tuple[NDArray[np.int32], tuple[Image, ...]]:
    """Return the tokens of the text, and the images with the positions of the images."""
    parts: list[NDArray[np.int32]] = []
    images: list[Image] = []
    length = 0
    for chunk in chunks:
        if chunk.WhichOneof("chunk") == "image":
            images.append(decode_image(f"{where}, image {len(images)}", chunk.image, length))
            continue
        parts.append(_decode_text(where, chunk))
        length += len(parts[-1])
    if not length and not images:
        raise UserError(f"{where} has no input tokens.")
    return np.concatenate(parts) if parts else np.empty(0, np.int32), tuple(images)


def _decode_text(where: str, chunk: wire_pb2.Chunk) -> NDArray[np.int32]:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise UserError(
            f"{where} holds a chunk of kind {kind or 'unknown'}; this server trains on encoded_text and image."
        )
    return array_of(f"{where}, encoded_text", chunk.encoded_text.tokens, np.dtype("<i4"))  # type: ignore[return-value]


def decode_image(where: str, chunk: wire_pb2.ImageChunk, before_token: int) -> Image:
    """Return the image without decoding it. The engine or the sampler checks later whether the image can be read."""
    if chunk.HasField("override_dimensions"):
        raise UserError(f"{where} has override_dimensions, which this server does not know. Send it in its own size.")
    expected = chunk.expected_tokens if chunk.HasField("expected_tokens") else None
    return Image(before_token, chunk.data, chunk.format, expected)


def encode_forward_backward(outcome: Outcome) -> bytes:
    """Encode a `ForwardBackwardOutput`, with one record for consecutive datums that have equal trailing shapes."""
    message = wire_pb2.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for run in _runs_of_equal_trailing_shape(outcome.outputs):
        message.loss_fn_outputs.append(_array_record(run))
    for name, value in outcome.metrics.items():
        message.metrics[name] = value
    # The metrics are a map. Without this option its order would differ when the call runs again.
    return message.SerializeToString(deterministic=True)


Outputs = Sequence[Mapping[str, NDArray[np.float32]]]


def _runs_of_equal_trailing_shape(outputs: Outputs) -> list[Outputs]:
    runs: list[list[Mapping[str, NDArray[np.float32]]]] = []
    previous = None
    for output in outputs:
        shapes = {name: array.shape[1:] for name, array in output.items()}
        if shapes != previous:
            runs.append([])
            previous = shapes
        runs[-1].append(output)
    return list(runs)


def _array_record(outputs: Outputs) -> wire_pb2.ArrayRecord:
    record = wire_pb2.ArrayRecord(type_tag="ArrayRecord", num_datums=len(outputs))
    for name in outputs[0]:
        arrays = [np.ascontiguousarray(output[name], dtype="<f4") for output in outputs]
        field = record.fields[name]
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
        field.dtype = wire_pb2.FLOAT32
        field.trailing_shape.extend(arrays[0].shape[1:])
    return record
