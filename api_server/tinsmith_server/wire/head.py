"""The head of a forward_backward body: the model and the number of the operation.

The head is read without decoding tensors. The message is protobuf: `model_id` is field 1, `seq_id` is field 2, and
`loss_fn` is field 4, after the data. Fields are skipped by their length. So a body of several megabytes takes only one
step for each datum.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, cast

import zstandard
from tinsmith_rpc import wire_pb2
from tinsmith_rpc.training_bodies import TOKEN_BYTES, BodyInvalid, outline_of
from tinsmith_rpc.zstd_frames import MAX_WINDOW_BYTES, FrameInvalid, unpack

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_SKIP_CHUNK_BYTES = 64 * 1024
_MAX_ID_BYTES = 1024
# This limit prevents a body of millions of empty fields from blocking the server. The SDK sends 1024 datums at most.
_MAX_FIELDS = 4096
# The limit of a protobuf message, and so of each of its fields.
_MAX_MESSAGE_BYTES = 2**31 - 1
# The limit of unpacking a compressed body up to a field.
_MAX_UNPACKED_BYTES = 64 * 2**20


class HeadUnreadable(ValueError):
    """The first fields of the body cannot be read, so the request cannot have a future."""


@dataclass(frozen=True, slots=True)
class Head:
    """The model and the number of a request.

    `loss_fn` comes after the data. `loss_fn` is None if the field could not be read.
    """

    model_id: str
    seq_id: int
    loss_fn: str | None = None


def read_head(body: bytes, encoding: str = "identity") -> Head:
    """Return the head of a `ForwardBackwardRequest`, which may be cut after the first fields.

    Raises HeadUnreadable if model_id or seq_id is missing, malformed, or of an unknown encoding.
    """
    fields = _Fields(_opened(body, encoding))
    try:
        return fields.head()
    except (EOFError, OSError, zlib.error, zstandard.ZstdError, UnicodeDecodeError) as error:
        raise HeadUnreadable(f"the body is not a forward_backward message: {error or 'it ends too early'}") from error


def _opened(body: bytes, encoding: str) -> IO[bytes]:
    match encoding:
        case "identity":
            return io.BytesIO(body)
        case "zstd":
            decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
            return io.BufferedReader(cast(io.RawIOBase, decompressor.stream_reader(body)))
        case "gzip":
            return cast(IO[bytes], gzip.GzipFile(fileobj=io.BytesIO(body)))
    raise HeadUnreadable(f"the content-encoding {encoding!r} is unknown; use identity, zstd or gzip")


class _Fields:
    """The fields at the top level of one protobuf message, which are read from the beginning."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._fields_left = _MAX_FIELDS
        self._bytes_left = _MAX_UNPACKED_BYTES

    def head(self) -> Head:
        model_id: str | None = None
        seq_id: int | None = None
        for number, wire_type in self._tags():
            if number == 1 and wire_type == _LENGTH_DELIMITED:
                model_id = self._short_text()
            elif number == 2 and wire_type == _VARINT:
                seq_id = self._varint()
            else:
                self._skip(wire_type)
            if model_id is not None and seq_id is not None:
                return Head(model_id, seq_id, self._loss())
        raise HeadUnreadable("the body has no model_id or no seq_id")

    def _loss(self) -> str | None:
        """Return the loss, if it can be read.

        Otherwise return None, because errors after the head make the future fail.
        """
        try:
            for number, wire_type in self._tags():
                if number == 4 and wire_type == _LENGTH_DELIMITED:
                    return self._short_text()
                self._skip(wire_type)
        except (EOFError, OSError, HeadUnreadable, UnicodeDecodeError, zlib.error, zstandard.ZstdError):
            pass
        return None

    def _tags(self) -> Iterator[tuple[int, int]]:
        while first := self._stream.read(1):
            self._fields_left -= 1
            if self._fields_left < 0:
                raise HeadUnreadable(f"the body has more than {_MAX_FIELDS} fields")
            tag = self._varint(first)
            yield tag >> 3, tag & 7

    def _varint(self, first: bytes = b"") -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = (first or self._exactly(1))[0]
            first = b""
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise HeadUnreadable("the body is not protobuf: a number has more than ten bytes")

    def _short_text(self) -> str:
        length = self._varint()
        if length > _MAX_ID_BYTES:
            raise HeadUnreadable(f"an identifier of {length} bytes is too long")
        return self._exactly(length).decode()

    def _skip(self, wire_type: int) -> None:
        lengths: dict[int, Callable[[], int]] = {
            _FIXED64: lambda: 8,
            _FIXED32: lambda: 4,
            _LENGTH_DELIMITED: self._varint,
        }
        if wire_type == _VARINT:
            self._varint()
        elif wire_type in lengths:
            self._discard(lengths[wire_type]())
        else:
            raise HeadUnreadable(f"the body is not protobuf: it uses wire type {wire_type}")

    def _discard(self, length: int) -> None:
        if length > _MAX_MESSAGE_BYTES:  # up to 70 bits, which is too large for a seek
            raise HeadUnreadable(
                f"the body is not protobuf: it has a field of {length} bytes; a message has {_MAX_MESSAGE_BYTES} at "
                "most"
            )
        if isinstance(self._stream, io.BytesIO):
            self._stream.seek(length, io.SEEK_CUR)
            return
        self._bytes_left -= length
        if self._bytes_left < 0:
            raise HeadUnreadable("the identifiers come after too much data")
        while length:
            length -= len(self._exactly(min(length, _SKIP_CHUNK_BYTES)))

    def _exactly(self, length: int) -> bytes:
        parts = b""
        while len(parts) < length:
            part = self._stream.read(length - len(parts))
            if not part:
                raise EOFError
            parts += part
        return parts


def trained_tokens(payload: bytes, unpacked_bytes: int | None = None) -> int:
    """Return the number of tokens in all inputs, including images.

    `unpacked_bytes` is the size that a zstd frame declares. A payload that is unreadable or too large counts as zero
    tokens, because the worker refuses it without any work.
    """
    try:
        return outline_of(payload if unpacked_bytes is None else unpack(payload, unpacked_bytes)).tokens
    except (BodyInvalid, FrameInvalid):
        return 0


def sampled_tokens(payload: bytes) -> int:
    response = wire_pb2.SampleResponse.FromString(payload)
    return sum(len(sequence.tokens) for sequence in response.sequences) // TOKEN_BYTES
