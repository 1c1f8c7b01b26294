"""Frames are decompressed within a limit, whether they declare their size or not."""

from __future__ import annotations

import struct

import pytest
import zstandard
from tinsmith_rpc.zstd_frames import MAX_WINDOW_BYTES, FrameInvalid, declared_bytes, unpack, unpacked_bytes

CONTENT = bytes(range(256)) * 40


def undeclared(content: bytes, **parameters: int) -> bytes:
    settings = zstandard.ZstdCompressionParameters.from_level(3, **parameters)
    compressor = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    return compressor.compress(content) + compressor.flush()


@pytest.mark.parametrize("compress", [zstandard.compress, undeclared])
def test_a_frame_within_the_limit_is_unpacked(compress: type[bytes]) -> None:
    frame = compress(CONTENT)
    assert unpacked_bytes(frame, len(CONTENT)) == len(CONTENT)
    assert unpack(frame, len(CONTENT)) == CONTENT


def test_a_frame_without_a_size_is_counted_up_to_the_limit() -> None:
    frame = undeclared(bytes(2**24))
    assert (declared_bytes(frame), unpacked_bytes(frame, 10_000)) == (None, 10_001)
    with pytest.raises(FrameInvalid):
        unpack(frame, 10_000)


def test_a_frame_that_declares_more_than_its_reader_takes_is_refused_before_memory_is_taken() -> None:
    declares_32_tebibytes = struct.pack("<IBQ", zstandard.MAGIC_NUMBER, 0xE0, 2**45) + b"\x01\0\0"
    assert unpacked_bytes(declares_32_tebibytes, 10_000) == 2**45
    with pytest.raises(FrameInvalid, match="more than 10000 bytes"):
        unpack(declares_32_tebibytes, 10_000)


def test_a_frame_that_wants_more_of_its_past_kept_than_a_reader_keeps_is_refused() -> None:
    frame = undeclared(CONTENT, window_log=(2 * MAX_WINDOW_BYTES).bit_length() - 1)
    with pytest.raises(FrameInvalid, match="too much memory"):
        unpacked_bytes(frame, 10_000)


@pytest.mark.parametrize("frame", [b"", b"no frame", zstandard.compress(CONTENT)[:-3], undeclared(CONTENT)[:-3]])
def test_an_incomplete_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(FrameInvalid):
        unpack(frame, unpacked_bytes(frame, len(CONTENT)))
