"""Frames of zstd, unpacked within a limit that is known before memory is taken for them."""

from __future__ import annotations

from typing import cast

# zstandard is imported in the functions, since the operator's image has this package and no zstandard.

PIECE_BYTES = 128 * 1024
MAX_WINDOW_BYTES = 64 * 2**20
"""A streaming reader keeps as much of what it has read as the frame asks for. Only level 22 asks for more."""


class FrameInvalid(ValueError):
    """The bytes are no frame of zstd, or a damaged one."""


def declared_bytes(frame: bytes) -> int | None:
    """Return the size that the frame declares; None where it declares none, as one that was written in pieces.

    Raises FrameInvalid.
    """
    import zstandard

    try:
        size = cast(int, zstandard.frame_content_size(frame))
    except zstandard.ZstdError as error:
        raise FrameInvalid(str(error)) from error
    return None if size < 0 else size


def unpacked_bytes(frame: bytes, limit: int) -> int:
    """How much the frame holds, as far as `limit` + 1: what does not say is read, and nothing of it is kept.

    Raises FrameInvalid. The content of a frame that says its size is not looked at.
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
    """The content, of `size` bytes at most: as `unpacked_bytes` has found. Raises FrameInvalid."""
    import zstandard

    try:
        # `max_output_size` counts only where a frame does not declare its size: others are given what they ask for.
        if (declared_bytes(frame) or 0) > size:
            raise FrameInvalid(f"it holds more than {size} bytes")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise FrameInvalid(str(error)) from error
