"""Bodies in, results out: everything the SDK can send is understood, everything else refused by name."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from support.worker.messages import datum, forward_backward, next_token_datum
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinsmith_rpc import wire_pb2
from tinsmith_trainer.engines.base import Outcome
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.torch_model.base_model import Image
from tinsmith_trainer.wire.codec import (
    ForwardBackward,
    decode_forward_backward,
    encode_forward_backward,
    open_body,
)
from tinsmith_trainer.wire.tensors import decode_tensor, encode_dense


def read(body: bytes, *, zstd: bool) -> ForwardBackward:
    return decode_forward_backward(open_body(body, zstd=zstd))


def test_a_compressed_body_is_decoded() -> None:
    body = zstandard.compress(forward_backward([next_token_datum([1, 2, 3])]))
    assert read(body, zstd=True).datums[0].tokens.tolist() == [1, 2]


def test_a_frame_that_declares_more_than_a_body_may_hold_is_refused() -> None:
    """No memory is allocated for it: such a frame has a dozen bytes."""
    declares_32_tebibytes = struct.pack("<IBQ", zstandard.MAGIC_NUMBER, 0xE0, 2**45) + b"\x01\0\0"
    with pytest.raises(UserError, match="over 536870912 bytes once unpacked"):
        read(declares_32_tebibytes, zstd=True)


def test_trap_26_dense_targets_and_sparse_weights_in_one_datum() -> None:
    message = datum([1, 2], {"target_tokens": [[1, 2], [3, 4]]})
    weights = message.loss_fn_inputs["weights"]
    weights.dtype, weights.shape[:] = wire_pb2.FLOAT32, [2, 2]
    weights.sparse_csr.values = np.array([0.5, -2.0], "<f4").tobytes()
    weights.sparse_csr.crow_indices = np.array([0, 1, 2], "<i8").tobytes()
    weights.sparse_csr.col_indices = np.array([1, 0], "<i8").tobytes()
    inputs = read(forward_backward([message]), zstd=False).datums[0].loss_inputs
    assert inputs["weights"].tolist() == [[0.0, 0.5], [-2.0, 0.0]]
    assert inputs["target_tokens"].tolist() == [[1, 2], [3, 4]]


def test_trap_26_several_text_chunks_are_one_input() -> None:
    message = next_token_datum([1, 2, 3])
    message.model_input.add().encoded_text.tokens = np.array([9], "<i4").tobytes()
    assert read(forward_backward([message]), zstd=False).datums[0].tokens.tolist() == [1, 2, 9]


def test_trap_26_an_empty_loss_config_and_text_values_in_v2() -> None:
    request = wire_pb2.ForwardBackwardRequest(data=[next_token_datum([1, 2])], loss_fn="ppo")
    request.loss_fn_config["clip_low_threshold"] = 0.8
    request.loss_fn_config_v2["clip_low_threshold"].number = 0.7
    request.loss_fn_config_v2["loss_id"].text = "abc"
    config = read(request.SerializeToString(), zstd=False).loss.config
    assert config == {"clip_low_threshold": 0.7, "loss_id": "abc"}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"target_tokens": [1], "weights": [float("nan")]}, r"datum 0, loss_fn_inputs\['weights'\] holds nan"),
        ({"target_tokens": [1], "advantages": [float("inf")]}, r"datum 0, loss_fn_inputs\['advantages'\] holds inf"),
    ],
    ids=["nan", "infinite"],
)
def test_floats_that_are_not_finite_are_refused(inputs: dict[str, list[float]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(forward_backward([datum([1], inputs)]), zstd=False)


def test_a_shape_that_disagrees_with_its_data_is_refused() -> None:
    message = next_token_datum([1, 2, 3])
    message.loss_fn_inputs["weights"].shape[:] = [7]
    with pytest.raises(UserError, match=r"has 2 values, but its shape \[7\] needs 7"):
        read(forward_backward([message]), zstd=False)


@pytest.mark.parametrize("tokens", [[1, 2], [1, 2, 3]])
def test_targets_without_a_shape_have_one_dimension(tokens: list[int]) -> None:
    """The SDK sends no shape for `TensorData(data, dtype)`."""
    message = next_token_datum(tokens)
    for tensor in message.loss_fn_inputs.values():
        tensor.ClearField("shape")
    inputs = read(forward_backward([message]), zstd=False).datums[0].loss_inputs
    assert inputs["target_tokens"].shape == (len(tokens) - 1,)


def test_one_value_without_a_shape_is_a_scalar() -> None:
    assert decode_tensor("sign", wire_pb2.Tensor(dtype=wire_pb2.FLOAT32, dense=bytes(4))).shape == ()


def test_a_sparse_tensor_too_large_to_densify_is_refused() -> None:
    message = next_token_datum([1, 2])
    weights = message.loss_fn_inputs["weights"]
    weights.shape[:] = [2**20, 2**20]
    weights.sparse_csr.crow_indices = b""
    with pytest.raises(UserError, match="dense"):
        read(forward_backward([message]), zstd=False)


def test_many_sparse_tensors_that_are_small_alone_are_refused_together() -> None:
    message = next_token_datum([1])
    weights = message.loss_fn_inputs["weights"]
    weights.shape[:] = [1, 2**24]
    weights.sparse_csr.crow_indices = np.array([0, 0], "<i8").tobytes()
    with pytest.raises(UserError, match="would take 671088640 bytes as dense ones"):
        read(forward_backward([message] * 5), zstd=False)


def test_audio_is_refused_by_name() -> None:
    message = next_token_datum([1, 2])
    message.model_input.add().dmel.dmel = b"a sound"
    with pytest.raises(UserError, match="chunk of kind dmel"):
        read(forward_backward([message]), zstd=False)


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_decoded_or_refused_never_a_crash(body: bytes, zstd: bool) -> None:
    try:
        read(body, zstd=zstd)
    except UserError:
        return


@given(st.data())
def test_a_damaged_body_is_decoded_or_refused_never_a_crash(data: st.DataObject) -> None:
    body = bytearray(forward_backward([next_token_datum([1, 2, 3]), datum([1], {"target_tokens": [[1, 2]]})]))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        read(bytes(body), zstd=False)
    except UserError:
        return


shapes = st.one_of(
    st.tuples(st.integers(1, 4)),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.integers(1, 4), st.just(2)),
)
arrays = shapes.flatmap(lambda shape: st_numpy.arrays(np.float32, shape, elements=st.floats(-10, 10, width=32)))


@given(st.lists(arrays, max_size=6))
def test_the_sdk_decodes_our_encoding(outputs: list[np.ndarray]) -> None:  # type: ignore[type-arg]
    """Decoded by the SDK's own code, in datum order, with every shape."""
    body = encode_forward_backward(Outcome([{"logprobs": output} for output in outputs], {"loss:sum": 1.5}))
    decoded = deserialize_forward_backward_output(body)
    assert decoded.metrics == {"loss:sum": 1.5}
    assert [(item["logprobs"].data, item["logprobs"].shape) for item in decoded.loss_fn_outputs] == [
        (output.ravel().tolist(), list(output.shape)) for output in outputs
    ]


def image_chunk(**fields: object) -> wire_pb2.Chunk:
    return wire_pb2.Chunk(image=wire_pb2.ImageChunk(data=b"a picture", format="png", **fields))  # type: ignore[arg-type]


def test_images_keep_their_place_among_the_texts_tokens() -> None:
    message = next_token_datum([1, 2, 3])
    message.model_input.append(image_chunk(expected_tokens=8))
    message.model_input.append(datum([4], {}).model_input[0])
    message.model_input.insert(0, image_chunk())

    [only] = read(forward_backward([message]), zstd=False).datums

    assert only.tokens.tolist() == [1, 2, 4]
    assert only.images == (Image(0, b"a picture", "png"), Image(2, b"a picture", "png", expected_tokens=8))


def test_an_image_that_is_to_have_other_dimensions_is_refused() -> None:
    message = next_token_datum([1, 2, 3])
    message.model_input.append(image_chunk(override_dimensions=wire_pb2.ImageDimensions(width=8, height=8)))
    with pytest.raises(UserError, match="datum 0, image 0 has override_dimensions"):
        read(forward_backward([message]), zstd=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": 99}, "has dtype 99; float32 and int64 are understood"),
        ({"shape": [1] * 9}, "has 9 dimensions; 8 are the most"),
        ({"shape": [-1, -3]}, r"has shape \[-1, -3\]; sizes must not be negative"),
    ],
    ids=["type", "dimensions", "negative"],
)
def test_a_tensor_of_an_impossible_type_or_shape_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    tensor = encode_dense(np.zeros(3, np.float32))
    tensor.MergeFrom(wire_pb2.Tensor(dtype=fields.get("dtype", tensor.dtype)))
    if "shape" in fields:
        tensor.shape[:] = fields["shape"]
    with pytest.raises(UserError, match=f"^weights {message}"):
        decode_tensor("weights", tensor)
