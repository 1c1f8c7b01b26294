"""A walk finds in a body what a parser would find, and stops at its limits."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from support.worker.messages import forward_backward, next_token_datum
from tinsmith_rpc import training_bodies, wire_pb2
from tinsmith_rpc.training_bodies import (
    MAX_DATUMS,
    MAX_PARTS,
    UNCOUNTED_IMAGE_TOKENS,
    BodyInvalid,
    BodyOutline,
    outline_of,
)

DEEP = 4_000


def chunk(tokens: int) -> wire_pb2.Chunk:
    return wire_pb2.Chunk(encoded_text=wire_pb2.EncodedTextChunk(tokens=bytes(4 * tokens)))


images = st.builds(
    lambda data, expected: wire_pb2.Chunk(image=wire_pb2.ImageChunk(data=data, expected_tokens=expected)),
    st.binary(max_size=200),
    st.sampled_from([None, -1, 0, 1, 2**31 - 1]),
)
tensors = st.builds(
    lambda dense, shape: wire_pb2.Tensor(dense=dense, dtype=wire_pb2.INT64, shape=shape),
    st.binary(max_size=200),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
)
datums = st.builds(
    lambda chunks, inputs: wire_pb2.Datum(model_input=chunks, loss_fn_inputs=inputs),
    st.lists(st.integers(0, 50).map(chunk) | images, max_size=4),
    st.dictionaries(st.text(max_size=5), tensors, max_size=4),
)
requests = st.builds(
    lambda data, forward_only, config: wire_pb2.ForwardBackwardRequest(
        model_id="s:train:0", seq_id=1, data=data, forward_only=forward_only, loss_fn_config=config
    ),
    st.lists(datums, max_size=4),
    st.booleans(),
    st.dictionaries(st.text(max_size=5), st.floats(), max_size=3),
)


def parsed_outline(body: bytes) -> BodyOutline:
    request = wire_pb2.ForwardBackwardRequest.FromString(body)
    chunks = [one for datum in request.data for one in datum.model_input]
    of_images = [one.image.expected_tokens for one in chunks if one.HasField("image")]
    text_bytes = sum(len(one.encoded_text.tokens) for one in chunks)
    tokens = text_bytes // 4 + sum(count if count > 0 else UNCOUNTED_IMAGE_TOKENS for count in of_images)
    parts = len(chunks) + sum(len(datum.loss_fn_inputs) for datum in request.data)
    return BodyOutline(len(request.data), parts, tokens, request.forward_only)


@given(requests, st.data())
def test_bodies_that_it_cannot_read_are_unreadable_for_every_parser(
    request: wire_pb2.ForwardBackwardRequest, data: st.DataObject
) -> None:
    body = bytearray(request.SerializeToString() + b"\0")
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    content = bytes(body[: data.draw(st.integers(0, len(body)))])
    try:
        outline_of(content)
    except BodyInvalid:
        with pytest.raises(DecodeError):
            wire_pb2.ForwardBackwardRequest.FromString(content)


@pytest.mark.parametrize(
    "unknown",
    [
        pytest.param(b"\xfa\x07\x02ab", id="text"),
        pytest.param(b"\xf8\x07\x05", id="number"),
        pytest.param(b"\xf9\x07" + bytes(8), id="eight-bytes"),
        pytest.param(b"\xfd\x07" + bytes(4), id="four-bytes"),
        pytest.param(b"\xfb\x07\x0b\x08\x01\x0c\x0a\x01x\xfc\x07", id="group-in-a-group"),
    ],
)
def test_fields_of_a_later_sdk_are_passed_over(unknown: bytes) -> None:
    body = unknown + forward_backward([next_token_datum([1, 2, 3])], forward_only=True) + unknown
    assert outline_of(body) == parsed_outline(body) == BodyOutline(1, 3, 2, True)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x1a", id="no-length"),
        pytest.param(b"\x1a\x05\0", id="cut-off"),
        pytest.param(b"\x1a\x02\x0a\x05" + bytes(9), id="longer-than-its-datum"),
        pytest.param(b"\x80" * 11, id="eleven-bytes-of-a-number"),
        pytest.param(b"\x02\0", id="field-0"),
        pytest.param(b"\x1e", id="wire-type-6"),
        pytest.param(b"\x1c", id="end-of-no-group"),
        pytest.param(b"\x7b\x84\x01", id="end-of-another-group"),
        pytest.param(b"\x7b" * DEEP, id="groups-without-an-end"),
        pytest.param(b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", id="a-length-of-63-bits"),
    ],
)
def test_an_invalid_message_is_refused(body: bytes) -> None:
    with pytest.raises(BodyInvalid, match="not a readable protobuf message"):
        outline_of(body)


def sized(field: int, content: bytes) -> bytes:
    """Return a field of a message, with a length of five bytes."""
    length = len(content)
    encoded = bytes(length >> shift & 0x7F | 0x80 for shift in (0, 7, 14, 21)) + bytes([length >> 28])
    return bytes([field << 3 | 2]) + encoded + content


FEW_TAGS = 1000
"""A small limit, so that a case has a few kilobytes."""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(b"\x1a\0" * (MAX_DATUMS + 1), f"more than {MAX_DATUMS} datums", id="datums"),
        pytest.param(sized(3, b"\x0a\0" * (MAX_PARTS + 1)), f"more than {MAX_PARTS} chunks and tensors", id="chunks"),
        pytest.param(sized(3, b"\x12\0" * (MAX_PARTS + 1)), f"more than {MAX_PARTS} chunks and tensors", id="tensors"),
    ],
)
def test_it_stops_at_the_first_datum_or_part_too_many(body: bytes, says: str) -> None:
    with pytest.raises(BodyInvalid, match=says):
        outline_of(body)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(sized(3, b"\x1a\0" * FEW_TAGS), id="spans"),
        pytest.param(sized(3, sized(1, b"\x0a\0\x12\0" * FEW_TAGS)), id="a-chunk-of-many-kinds"),
        pytest.param(sized(3, sized(1, sized(2, b"\x22\0" * FEW_TAGS))), id="an-image"),
        pytest.param(sized(3, sized(1, sized(1, b"\x0a\0" * FEW_TAGS))), id="a-text"),
        pytest.param(sized(3, sized(2, sized(2, sized(4, bytes(FEW_TAGS))))), id="a-packed-shape"),
        pytest.param(sized(3, sized(2, sized(2, b"\x20\1" * FEW_TAGS))), id="a-bare-shape"),
        pytest.param(sized(3, sized(2, sized(2, b"\x12\0\x0a\0" * FEW_TAGS))), id="a-tensor-of-many-kinds"),
        pytest.param(b"\x2a\0" * FEW_TAGS, id="loss-config"),
        pytest.param(sized(7, b"\x12\0" * FEW_TAGS), id="loss-config-values"),
        pytest.param(b"\x78\1" * FEW_TAGS, id="unknown-fields"),
        pytest.param(b"\x7b" * FEW_TAGS, id="open-groups"),
    ],
)
def test_every_tag_counts(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_bodies, "MAX_TAGS", FEW_TAGS - 1)
    with pytest.raises(BodyInvalid, match=f"more than {FEW_TAGS - 1} fields"):
        outline_of(body)


def test_a_body_of_as_many_parts_as_there_may_be_has_room_for_their_fields() -> None:
    tensor = wire_pb2.Tensor(dense=bytes(8), dtype=wire_pb2.INT64, shape=[2**62] * 3)
    datum = wire_pb2.Datum(model_input=[chunk(1)] * 8, loss_fn_inputs={str(n): tensor for n in range(8)})
    request = wire_pb2.ForwardBackwardRequest(data=[datum] * 64)
    assert outline_of(request.SerializeToString()) == parsed_outline(request.SerializeToString())
