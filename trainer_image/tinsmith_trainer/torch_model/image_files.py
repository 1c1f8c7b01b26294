"""Decoding of images: accepted formats, size limits, and errors for all other images.

A header of a few bytes may claim gigabytes of pixels. So the size is read first, and pixels are decoded only if the
size is within the limits.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image as PillowImage

from tinsmith_trainer.errors import UserError
from tinsmith_trainer.torch_model.base_model import Image

FORMATS = ("png", "jpeg")
MAX_IMAGE_BYTES = 16 * 2**20
MAX_IMAGE_PIXELS = 16 * 2**20
"""The limit on width times height.

A decoded image of this size takes 48 MiB. A processor uses about ten times as much.
"""
MAX_IMAGE_SIDE = 16_384
MAX_IMAGES = 64
MAX_PIXELS_TOGETHER = 64 * 2**20
"""The limit on the pixels of all images in a datum or prompt, because all images are in memory at the same time."""


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The width and height of an image in pixels."""

    height: int
    width: int

    @property
    def pixels(self) -> int:
        return self.height * self.width


def read_sizes(what: str, images: Sequence[Image]) -> list[ImageSize]:
    """Read the sizes of the images of `what`, a datum or prompt, from the image headers.

    Raises UserError for sizes beyond the limits.
    """
    if len(images) > MAX_IMAGES:
        raise UserError(f"{what} has {len(images)} images; the limit is {MAX_IMAGES}.")
    sizes = [_read_size(f"{what}, image {index}", image) for index, image in enumerate(images)]
    together = sum(size.pixels for size in sizes)
    if together > MAX_PIXELS_TOGETHER:
        raise UserError(
            f"{what} has images of {together} pixels in total; the limit is {MAX_PIXELS_TOGETHER}. Scale them down."
        )
    return sizes


def read_pixels(what: str, image: Image) -> PillowImage.Image:
    """Decode an image to RGB. Raises UserError, which begins with `what`, for a truncated or damaged image."""
    try:
        with _opened(image) as file:
            file.info.pop("transparency", None)  # Pillow would warn that it is dropped
            return file.convert("RGB")
    except Exception as error:  # Pillow's readers raise OSError, SyntaxError, ValueError, struct.error, …
        raise UserError(f"{what} cannot be decoded as {image.format}: {error}.") from error


def _read_size(what: str, image: Image) -> ImageSize:
    if image.format not in FORMATS:
        raise UserError(f"{what} has the format {image.format!r}; supported are {' and '.join(FORMATS)}. Convert it.")
    if len(image.content) > MAX_IMAGE_BYTES:
        raise UserError(f"{what} has {len(image.content)} bytes; the limit is {MAX_IMAGE_BYTES}. Scale it down.")
    try:
        with _opened(image) as file:
            size = ImageSize(file.height, file.width)
    except (PillowImage.DecompressionBombError, PillowImage.DecompressionBombWarning) as error:
        raise UserError(f"{what} claims to have far more pixels than the limit of {MAX_IMAGE_PIXELS}.") from error
    except Exception as error:
        raise UserError(f"{what} is not a readable {image.format} file: its header is invalid.") from error
    if size.pixels > MAX_IMAGE_PIXELS or max(size.height, size.width) > MAX_IMAGE_SIDE:
        raise UserError(
            f"{what} is {size.width} x {size.height} pixels; the limit is {MAX_IMAGE_PIXELS} pixels, and "
            f"{MAX_IMAGE_SIDE} a side. Scale it down."
        )
    return size


def _opened(image: Image) -> PillowImage.Image:
    """Open an image and read the header, but no pixels."""
    return PillowImage.open(io.BytesIO(image.content), formats=[image.format.upper()])
