"""Training requests in JSON become the message that an SDK of today sends."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
import pytest
from tinsmith_rpc import wire_pb2
from tinsmith_server.wire.json_bodies import BadJson, read_object
from tinsmith_server.wire.json_training import InvalidTraining, training_message, training_shape

LIMIT = 2**20
TOKENS = list(range(200, 400))
WEIGHTS = [1.0, 0.1, -2.5e-7, *[1.0 / number for number in range(1, 198)]]


def datum(**changes: Any) -> dict[str, Any]:
    inputs = {
        "target_tokens": {"data": TOKENS, "dtype": "int64", "shape": [200]},
        "weights": {"data": WEIGHTS, "dtype": "float32"},
    }
    return {"model_input": {"chunks": [{"tokens": TOKENS}]}, "loss_fn_inputs": inputs, **changes}


def call(*datums: Any, **changes: Any) -> dict[str, Any]:
    return {"data": list(datums), "loss_fn": "cross_entropy", **changes}


def read(content: Any) -> wire_pb2.ForwardBackwardRequest:
    """Through the bytes, as a body comes."""
    body = read_object(orjson.dumps({"call": content}), training_shape(LIMIT))
    return training_message(body["call"], forward_only=False)


def test_every_number_arrives_as_it_was_sent() -> None:
    message = read(call(datum(), loss_fn_config={"clip": 0.2, "kind": "a"}))
    [sent] = message.data
    assert np.frombuffer(sent.model_input[0].encoded_text.tokens, "<i4").tolist() == TOKENS
    targets, weights = sent.loss_fn_inputs["target_tokens"], sent.loss_fn_inputs["weights"]
    assert (targets.dtype, list(targets.shape)) == (wire_pb2.INT64, [200])
    assert np.frombuffer(targets.dense, "<i8").tolist() == TOKENS
    assert (weights.dtype, list(weights.shape)) == (wire_pb2.FLOAT32, [200])
    assert np.frombuffer(weights.dense, "<f4").tolist() == np.array(WEIGHTS, "<f4").tolist()
    assert (dict(message.loss_fn_config), message.loss_fn_config_v2["kind"].text) == ({"clip": 0.2}, "a")


def test_whole_numbers_may_stand_for_floats_and_begin_a_list_of_them() -> None:
    for values in ([1] * 40, [*[1] * 40, 0.5], [1, 0.5]):
        weights = {"weights": {"data": values, "dtype": "float32"}}
        [sent] = read(call(datum(loss_fn_inputs=weights))).data
        assert np.frombuffer(sent.loss_fn_inputs["weights"].dense, "<f4").tolist() == values


def test_an_image_of_the_first_sdks_says_under_tokens_how_many_it_takes() -> None:
    image = {"data": base64.b64encode(b"png").decode(), "format": "png", "height": 2, "width": 2, "tokens": 7}
    [sent] = read(call(datum(model_input={"chunks": [image]}))).data
    assert (sent.model_input[0].image.data, sent.model_input[0].image.expected_tokens) == (b"png", 7)


def test_sparse_tensors_keep_their_rows() -> None:
    sparse = {"data": [3, 4], "dtype": "int64", "shape": [2, 5], "sparse_crow_indices": [0, 1, 2]}
    [sent] = read(call(datum(loss_fn_inputs={"target_tokens": sparse | {"sparse_col_indices": [0, 4]}}))).data
    rows = sent.loss_fn_inputs["target_tokens"].sparse_csr
    assert np.frombuffer(rows.crow_indices, "<i8").tolist() == [0, 1, 2]
    assert np.frombuffer(rows.values, "<i8").tolist() == [3, 4]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "valid dictionary"),
        (call(None), "datum 0: "),
        (call(datum(), datum(model_input={"chunks": [{"tokens": [1.5]}]})), "datum 1: model_input.chunks.0.tokens"),
        (call(datum(model_input={"chunks": [{"tokens": [2**40]}]})), "outside 32 bits"),
        (call(datum(model_input={"chunks": [{"dmel": "AAAA"}]})), "a chunk of type 'dmel'"),
        (call(datum(loss_fn_inputs={"weights": {"data": [None], "dtype": "float32"}})), "must be a list of numbers"),
        (call(datum(loss_fn_inputs={"target_tokens": {"data": [0.5], "dtype": "int64"}})), "that is not int64"),
        (call(datum(loss_fn_inputs={"weights": {"data": [1.0], "dtype": "bfloat16"}})), "'float32' or 'int64'"),
    ],
)
def test_an_error_names_its_datum(content: Any, says: str) -> None:
    with pytest.raises(InvalidTraining, match=says):
        read(content)


def test_a_body_holds_no_more_numbers_than_one_in_protobuf_could() -> None:
    with pytest.raises(BadJson, match=f"more than {LIMIT // 4} numbers"):
        read(call(datum(model_input={"chunks": [{"tokens": [0] * (LIMIT // 4 + 1)}]})))
    many = [{"tokens": [0] * 100}] * (LIMIT // 400 + 1)
    with pytest.raises(BadJson, match=f"more than {LIMIT // 4} numbers"):
        read(call(datum(model_input={"chunks": many})))
