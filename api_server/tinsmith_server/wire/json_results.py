"""Results of forward, forward_backward and sample in JSON.

SDKs below 0.18 need JSON results, because these SDKs do not know protobuf.

Each tensor is converted separately, so that other requests run in between.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from tinsmith_rpc import wire_pb2

STOP_REASONS: Mapping[int, str] = {wire_pb2.STOP: "stop", wire_pb2.LENGTH: "length"}
DTYPES: Mapping[int, tuple[str, str]] = {
    wire_pb2.FLOAT32: ("f", "float32"),
    wire_pb2.INT64: ("q", "int64"),
    wire_pb2.INT32: ("i", "int64"),
}
# The sampler's value for an empty cell in the table of likeliest tokens.
EMPTY_CELL_LOGPROB = -99999.0


def result_as_json(payload: bytes, *, of_sample: bool) -> bytes:
    """Return the same numbers in JSON. The numbers are exact to the last bit.

    A float32 is written as the double with the same value.
    """
    return sample_as_json(payload) if of_sample else forward_backward_as_json(payload)


# ---- forward and forward_backward


def forward_backward_as_json(payload: bytes) -> bytes:
    output = wire_pb2.ForwardBackwardOutput.FromString(payload)
    rest = {"loss_fn_output_type": output.loss_fn_output_type, "metrics": _metrics(output.metrics)}
    datums = b",".join(datum for record in output.loss_fn_outputs for datum in _datums(record))
    return orjson.dumps(rest)[:-1] + b',"loss_fn_outputs":[' + datums + b"]}"


def _metrics(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Return the metrics. JSON has no form for infinite values.

    Infinite values are written as texts that every SDK reads as numbers.
    """
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def _datums(record: wire_pb2.ArrayRecord) -> Iterator[bytes]:
    fields = [(name, _Batch(field)) for name, field in sorted(record.fields.items())]
    for index in range(record.num_datums):
        yield b"{" + b",".join(orjson.dumps(name) + b":" + batch.tensor(index) for name, batch in fields) + b"}"


class _Batch:
    """A field with the values of all datums."""

    def __init__(self, field: wire_pb2.BatchedTensor) -> None:
        self._type_code, self._dtype = DTYPES[field.dtype]
        self._data = memoryview(field.data)
        self._offsets = _array("q", field.offsets)
        self._trailing = list(field.trailing_shape)

    def tensor(self, index: int) -> bytes:
        numbers = _array(self._type_code, self._data[self._offsets[index] : self._offsets[index + 1]])
        shape = [len(numbers) // math.prod(self._trailing), *self._trailing] if all(self._trailing) else [0]
        values = _numbers(numbers)
        return b'{"data":' + values + b',"dtype":"' + self._dtype.encode() + b'","shape":' + orjson.dumps(shape) + b"}"


def _numbers(numbers: array[Any]) -> bytes:
    """Return the numbers.

    Infinite values are written as in Python, because the JSON reader of SDKs below 0.18 accepts this form.
    """
    values = numbers.tolist()
    finite = numbers.typecode != "f" or all(map(math.isfinite, values))
    return orjson.dumps(values) if finite else json.dumps(values).encode()


# ---- samples


def sample_as_json(payload: bytes) -> bytes:
    response = wire_pb2.SampleResponse.FromString(payload)
    rest: dict[str, Any] = {"type": "sample"}
    if response.HasField("prompt_logprobs"):
        rest["prompt_logprobs"] = _scored(response.prompt_logprobs)
    if response.HasField("topk_prompt_logprobs"):
        rest["topk_prompt_logprobs"] = _Likeliest.of(response.topk_prompt_logprobs).rows()
    sequences = b",".join(orjson.dumps(_sequence(sequence)) for sequence in response.sequences)
    return orjson.dumps(rest)[:-1] + b',"sequences":[' + sequences + b"]}"


def _sequence(sequence: wire_pb2.SampledSequence) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "stop_reason": STOP_REASONS[sequence.stop_reason],
        "tokens": _array("i", sequence.tokens).tolist(),
    }
    if sequence.HasField("logprobs"):
        answer["logprobs"] = _array("f", sequence.logprobs).tolist()
    return answer


def _scored(logprobs: bytes) -> list[float | None]:
    return [None if math.isnan(value) else value for value in _array("f", logprobs)]


@dataclass(frozen=True, slots=True)
class _Likeliest:
    tokens: Sequence[int]
    logprobs: Sequence[float]
    k: int

    @classmethod
    def of(cls, likeliest: wire_pb2.TopkLogprobs) -> _Likeliest:
        return cls(_array("i", likeliest.token_ids), _array("f", likeliest.logprobs), likeliest.k)

    def rows(self) -> list[list[tuple[int, float]] | None]:
        """Return the most likely tokens of each position, or None for a position without requested tokens."""
        starts = range(0, len(self.tokens), self.k) if self.k else ()
        return [self._row(start) or None for start in starts]

    def _row(self, start: int) -> list[tuple[int, float]]:
        cells = zip(self.tokens[start : start + self.k], self.logprobs[start : start + self.k], strict=True)
        return [(token, logprob) for token, logprob in cells if logprob != EMPTY_CELL_LOGPROB]


def _array(type_code: str, content: bytes | memoryview) -> array[Any]:
    numbers: array[Any] = array(type_code)
    numbers.frombytes(content)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
