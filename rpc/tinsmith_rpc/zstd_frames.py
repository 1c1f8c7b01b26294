"""Decompression of zstd frames. The size limit is checked before memory is allocated."""

from __future__ import annotations

from typing import cast

# zstandard is imported in functions, because the operator's image has this package but not zstandard.

PIECE_BYTES = 128 * 1024
MAX_WINDOW_BYTES = 64 * 2**20
"""The largest window that a zstd frame may have.

A streaming reader keeps the window in memory. Only compression level 22 needs a larger window.
"""


class FrameInvalid(ValueError):
    """An error for bytes that are no zstd frame, or that are a damaged frame."""


def declared_bytes(frame: bytes) -> int | None:
    """Return the size that the frame declares. Return None if the frame was written in pieces.

    Raises FrameInvalid.
    """
    import zstandard

    try:
        size = cast(int, zstandard.frame_content_size(frame))
    except zstandard.ZstdError as error:
        raise FrameInvalid(str(error)) from error
    return None if size < 0 else size


def unpacked_bytes(frame: bytes, limit: int) -> int:
    """Return the unpacked size of the frame, but at most `limit` + 1.

    If a frame does not declare its size, it is decompressed, and the content is discarded. The content of other frames
    is not read. Raises FrameInvalid.
    """
    import zstandard

    if (size := declared_bytes(frame)) is not None:
        return size
    found = 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(frame) as reader:
            while found <= limit and (piece := reader.read(PIECE_BYTES)):
                found += len(piece)
    except zstandard.ZstdError as error:
        raise FrameInvalid(str(error)) from error
    return min(found, limit + 1)


def unpack(frame: bytes, size: int) -> bytes:
    """Return the content.

    The content has at most `size` bytes, which `unpacked_bytes` returned. Raises FrameInvalid.
    """
    import zstandard

    try:
        # `max_output_size` applies only to a frame that does not declare its size. For other frames, the declared size
        # is allocated.
        if (declared_bytes(frame) or 0) > size:
            raise FrameInvalid(f"it holds more than {size} bytes")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise FrameInvalid(str(error)) from error
