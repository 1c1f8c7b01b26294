"""A sample on its way in and out: the SDK reads back what we encode, by its own code."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from tinker import TensorData
from tinker.proto.request_conv import _tensor_data_to_proto
from tinker.proto.response_conv import deserialize_sample_response
from tinsmith_rpc import wire_pb2, worker_pb2
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.base import NO_TARGET, AltTokens, SampleOutcome, Sequence, TopkLogprobs
from tinsmith_trainer.sampling.codec import decode_sample, encode_sample

PLAIN = worker_pb2.SampleRequest()
targets = st_numpy.arrays(
    np.int64, st.tuples(st.integers(1, 5), st.integers(1, 4)), elements=st.integers(NO_TARGET, 9)
).filter(lambda ids: bool((ids != NO_TARGET).any()))


def asking(tensor: wire_pb2.Tensor) -> worker_pb2.SampleRequest:
    return worker_pb2.SampleRequest(target_prompt_logprobs=tensor)


def on_the_wire(tensor: TensorData) -> wire_pb2.Tensor:
    """Encode as the SDK does, in this package's message type."""
    return wire_pb2.Tensor.FromString(_tensor_data_to_proto(tensor).SerializeToString())


def sparse(ids: np.ndarray) -> TensorData:  # type: ignore[type-arg]
    """Return a sparse tensor of the non-zero entries. The SDK's own conversion keeps a smaller dense one."""
    rows, columns = np.nonzero(ids != NO_TARGET)
    starts = np.searchsorted(rows, np.arange(len(ids) + 1))
    return TensorData(
        data=ids[rows, columns],
        dtype="int64",
        shape=list(ids.shape),
        sparse_crow_indices=starts.tolist(),
        sparse_col_indices=columns.tolist(),
    )


@given(st.integers(0, 4), st.integers(1, 3))
def test_the_sdk_reads_the_likeliest_tokens_of_every_sampled_position(length: int, k: int) -> None:
    token_ids = np.arange(length * k, dtype=np.int32).reshape(length, k)
    topk = TopkLogprobs(token_ids, -1.0 - token_ids.astype(np.float32))
    sequence = Sequence(np.zeros(length, np.int32), np.zeros(length, np.float32), stopped=False, topk_logprobs=topk)
    [read] = deserialize_sample_response(encode_sample(SampleOutcome((sequence,)), PLAIN)).sequences
    expected = [[(int(token), -1.0 - float(token)) for token in row] for row in token_ids]
    assert read.topk_logprobs == (expected or None), "of a sequence without tokens the SDK sees none"


@given(targets, st.booleans())
def test_target_logprobs_come_back_in_the_layout_they_were_asked_in(ids: np.ndarray, as_sparse: bool) -> None:  # type: ignore[type-arg]
    asked = sparse(ids) if as_sparse else TensorData.from_numpy(ids)
    request = asking(on_the_wire(asked))
    decoded = decode_sample(request).target_prompt_logprobs
    assert decoded is not None
    assert decoded.tolist() == ids.tolist()
    logprobs = np.where(decoded == NO_TARGET, 0.0, -1.0 - decoded).astype(np.float32)
    read = deserialize_sample_response(encode_sample(SampleOutcome((), target_prompt_logprobs=logprobs), request))
    answer = read.target_prompt_logprobs
    assert answer is not None
    assert answer.dtype == "float32"
    assert answer.sparse_crow_indices == asked.sparse_crow_indices
    assert answer.sparse_col_indices == asked.sparse_col_indices
    assert answer.to_torch().tolist() == logprobs.tolist()


def test_a_listed_cell_that_asks_for_nothing_is_answered_with_nothing() -> None:
    request = asking(changed(values=np.array([3, NO_TARGET]).tobytes()))
    decoded = decode_sample(request).target_prompt_logprobs
    assert decoded is not None
    assert decoded.tolist() == [[3, NO_TARGET], [NO_TARGET, NO_TARGET]]
    outcome = SampleOutcome((), target_prompt_logprobs=np.array([[-0.5, 0.0], [0.0, 0.0]], np.float32))
    answer = deserialize_sample_response(encode_sample(outcome, request)).target_prompt_logprobs
    assert answer is not None
    assert answer.sparse_col_indices == [0, 1]
    assert list(answer.data) == [-0.5, 0.0]


def test_alternatives_are_two_dense_tensors_with_wide_ids() -> None:
    drawn = AltTokens(np.array([[1, 2], [3, 4]], np.int32), np.array([[-1, -2], [-3, -4]], np.float32))
    answer = deserialize_sample_response(encode_sample(SampleOutcome((), prompt_alt_tokens=drawn), PLAIN))
    assert answer.prompt_alt_tokens is not None
    assert answer.prompt_alt_tokens.tokens.dtype == "int64"
    assert answer.prompt_alt_tokens.tokens.to_torch().tolist() == [[1, 2], [3, 4]]
    assert answer.prompt_alt_tokens.logprobs.to_torch().tolist() == [[-1, -2], [-3, -4]]


def changed(**changes: object) -> wire_pb2.Tensor:
    tensor = on_the_wire(sparse(np.array([[3, NO_TARGET], [NO_TARGET, 4]])))
    for name, value in changes.items():
        part = tensor if name in ("shape", "dtype") else tensor.sparse_csr
        if name == "shape":
            del tensor.shape[:]
            tensor.shape.extend(value)  # type: ignore[arg-type]
        else:
            setattr(part, name, value)
    return tensor


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (changed(shape=[2, 1]), "col_indices that do not fit 2 values and 1 columns"),
        (changed(shape=[3, 2]), "crow_indices that do not fit 3 rows"),
        (changed(shape=[2, 10**12]), "would take more than"),
        (changed(shape=[2]), "two dimensions"),
        (changed(values=b"123"), "not a multiple of 8"),
        (
            changed(crow_indices=np.array([0, 2, 2]).tobytes(), col_indices=np.array([1, 1]).tobytes()),
            "lists an entry twice",
        ),
        (wire_pb2.Tensor(dense=b"\0" * 4, dtype=wire_pb2.FLOAT32, shape=[1, 1]), "must be int64"),
    ],
    ids=["columns", "rows", "too-large", "dimensions", "bytes", "twice", "floats"],
)
def test_a_tensor_of_targets_that_is_none_is_refused_by_name(tensor: wire_pb2.Tensor, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as refused:
        decode_sample(asking(tensor))
    assert str(refused.value).startswith("target_prompt_logprobs")
