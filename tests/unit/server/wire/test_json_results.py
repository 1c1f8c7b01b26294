"""Results in JSON hold the numbers of those in protobuf, to the bit."""

from __future__ import annotations

import json
import math

import numpy as np
from tinsmith_rpc import wire_pb2
from tinsmith_server.wire.json_results import result_as_json

LOGPROBS = [-0.1, -1e-7, -3.25, -12.000001]


def batched(*rows: list[float], trailing: tuple[int, ...] = ()) -> wire_pb2.BatchedTensor:
    arrays = [np.array(row, "<f4") for row in rows]
    return wire_pb2.BatchedTensor(
        data=b"".join(array.tobytes() for array in arrays),
        offsets=np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes(),
        dtype=wire_pb2.FLOAT32,
        trailing_shape=trailing,
    )


def output(**fields: wire_pb2.BatchedTensor) -> bytes:
    record = wire_pb2.ArrayRecord(num_datums=2, fields=fields)
    metrics = {"loss:sum": 1.5, "bad:mean": math.nan, "much:max": math.inf}
    return wire_pb2.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record, wire_pb2.ArrayRecord(num_datums=1)], metrics=metrics
    ).SerializeToString()


def test_outputs_of_each_datum_in_their_order() -> None:
    result = json.loads(result_as_json(output(logprobs=batched(LOGPROBS, LOGPROBS[:1])), of_sample=False))
    first, second, nothing = result["loss_fn_outputs"]
    assert first["logprobs"] == {"data": np.array(LOGPROBS, "<f4").tolist(), "dtype": "float32", "shape": [4]}
    assert (second["logprobs"]["shape"], nothing) == ([1], {})
    assert result["loss_fn_output_type"] == "ArrayRecord"


def test_more_dimensions_keep_their_shape() -> None:
    result = json.loads(result_as_json(output(x=batched([1, 2, 3, 4], [], trailing=(2,))), of_sample=False))
    assert [one["x"]["shape"] for one in result["loss_fn_outputs"][:2]] == [[2, 2], [0, 2]]


def test_values_that_are_not_finite_arrive_in_these_sdks() -> None:
    result = json.loads(result_as_json(output(logprobs=batched([math.nan], [-math.inf])), of_sample=False))
    assert math.isnan(result["loss_fn_outputs"][0]["logprobs"]["data"][0])
    assert result["loss_fn_outputs"][1]["logprobs"]["data"] == [-math.inf]
    assert (result["metrics"]["bad:mean"], result["metrics"]["much:max"]) == ("nan", "inf")


def test_a_sample_with_all_that_these_sdks_ask_for() -> None:
    likeliest = wire_pb2.TopkLogprobs(
        token_ids=np.array([0, 0, 5, 0], "<i4").tobytes(),
        logprobs=np.array([-99999.0, -99999.0, -0.5, -99999.0], "<f4").tobytes(),
        k=2,
        length=2,
    )
    sequences = [
        wire_pb2.SampledSequence(
            stop_reason=wire_pb2.LENGTH,
            tokens=np.array([1, 2], "<i4").tobytes(),
            logprobs=np.array([-0.5, -1.5], "<f4").tobytes(),
        ),
        wire_pb2.SampledSequence(stop_reason=wire_pb2.STOP),
    ]
    scored = np.array([math.nan, -2.5], "<f4").tobytes()
    response = wire_pb2.SampleResponse(sequences=sequences, prompt_logprobs=scored, topk_prompt_logprobs=likeliest)
    assert json.loads(result_as_json(response.SerializeToString(), of_sample=True)) == {
        "type": "sample",
        "prompt_logprobs": [None, -2.5],
        "topk_prompt_logprobs": [None, [[5, -0.5]]],
        "sequences": [
            {"stop_reason": "length", "tokens": [1, 2], "logprobs": [-0.5, -1.5]},
            {"stop_reason": "stop", "tokens": []},
        ],
    }
