"""Reading who a forward_backward body is for."""

from __future__ import annotations

import gzip
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_rpc import wire_pb2
from tinsmith_server.wire.head import Head, HeadUnreadable, read_head


def body(model_id: str = "s:train:0", seq_id: int = 1, datums: int = 0, loss_fn: str = "ppo") -> bytes:
    datum = wire_pb2.Datum()
    datum.model_input.add().encoded_text.tokens = bytes(400)
    request = wire_pb2.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, data=[datum] * datums, loss_fn=loss_fn, forward_only=True
    )
    request.loss_fn_config["clip"] = 0.2
    return request.SerializeToString()


@given(
    st.text(min_size=1, max_size=200), st.integers(1, 2**31 - 1), st.integers(0, 3), st.text(min_size=1, max_size=40)
)
def test_the_head_equals_the_encoding_of_protobuf(model_id: str, seq_id: int, datums: int, loss_fn: str) -> None:
    assert read_head(body(model_id, seq_id, datums, loss_fn)) == Head(model_id, seq_id, loss_fn)


@pytest.mark.parametrize(("encoding", "compress"), [("zstd", zstandard.compress), ("gzip", gzip.compress)])
def test_a_compressed_body_has_the_same_head(encoding: str, compress: Callable[[bytes], bytes]) -> None:
    assert read_head(compress(body(datums=3)), encoding) == Head("s:train:0", 1, "ppo")


def test_a_small_body_that_unpacks_without_end_is_not_unpacked_to_its_end() -> None:
    padding = b"\x3a\x80\x80\x80\x80\x04" + bytes(2**30 // 8)
    assert read_head(zstandard.compress(body(loss_fn="") + padding), "zstd") == Head("s:train:0", 1)


def test_a_body_of_very_many_fields_is_not_read_to_its_end() -> None:
    assert read_head(body(loss_fn="") + b"\x38\x01" * 200_000 + body()) == Head("s:train:0", 1)
    with pytest.raises(HeadUnreadable, match="more than 4096 fields"):
        read_head(b"\x38\x01" * 200_000 + body())


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (b"", "identity"),
        (b"\x0a", "identity"),
        (b"\x0a\x05ab", "identity"),
        (b"\xff" * 12, "identity"),
        (b"\x0a\x02\xff\xfe\x10\x01", "identity"),
        (b"\x0b\x0c", "identity"),
        (b"{}", "zstd"),
        (b"{}", "gzip"),
        (b"\x0a\x01m\x10\x01", "br"),
    ],
)
def test_a_body_without_a_head_is_unreadable(content: bytes, encoding: str) -> None:
    with pytest.raises(HeadUnreadable):
        read_head(content, encoding)


def length_of(number: int) -> bytes:
    """Return the key of field 7, which is skipped by its length, and the length."""
    written = bytearray(b"\x3a")
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


IMPOSSIBLE = [2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**70 - 1]
ENCODINGS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("identity", bytes),
    ("zstd", zstandard.compress),
    ("gzip", gzip.compress),
]


@pytest.mark.parametrize("length", IMPOSSIBLE, ids=hex)
@pytest.mark.parametrize(("encoding", "compress"), ENCODINGS)
def test_a_field_before_the_head_longer_than_any_message_is_refused_with_its_length(
    encoding: str, compress: Callable[[bytes], bytes], length: int
) -> None:
    with pytest.raises(HeadUnreadable, match=f"a field of {length} bytes; a message has 2147483647 at most"):
        read_head(compress(length_of(length) + body()), encoding)


@pytest.mark.parametrize("length", IMPOSSIBLE, ids=hex)
@pytest.mark.parametrize(("encoding", "compress"), ENCODINGS)
def test_a_field_longer_than_any_message_behind_the_head_is_the_futures_business(
    encoding: str, compress: Callable[[bytes], bytes], length: int
) -> None:
    assert read_head(compress(body(loss_fn="") + length_of(length)), encoding) == Head("s:train:0", 1)


@given(st.binary(max_size=300), st.sampled_from(["identity", "zstd", "gzip"]))
def test_no_bytes_at_all_can_break_the_reader(content: bytes, encoding: str) -> None:
    try:
        head = read_head(content, encoding)
    except HeadUnreadable:
        return
    assert isinstance(head.model_id, str)
    assert isinstance(head.seq_id, int)
