"""Images as their senders encoded them, to pixels: what is read, how large it may be, and what is said of the rest.

A few bytes of a header may ask for gigabytes of memory. So the size is read first, and pixels only of what is within
the limits.
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
"""Of width times height: 48 MiB once decoded, and some ten times as much while a processor works on it."""
MAX_IMAGE_SIDE = 16_384
MAX_IMAGES = 64
MAX_PIXELS_TOGETHER = 64 * 2**20
"""Of all images of a datum or a prompt, which are in memory at the same time."""


@dataclass(frozen=True, slots=True)
class ImageSize:
    """In pixels."""

    height: int
    width: int

    @property
    def pixels(self) -> int:
        return self.height * self.width


def read_sizes(what: str, images: Sequence[Image]) -> list[ImageSize]:
    """Of the images of `what`, a datum or prompt, by their headers. Raises UserError at the limits."""
    if len(images) > MAX_IMAGES:
        raise UserError(f"{what} has {len(images)} images; {MAX_IMAGES} are the most.")
    sizes = [_read_size(f"{what}, image {index}", image) for index, image in enumerate(images)]
    together = sum(size.pixels for size in sizes)
    if together > MAX_PIXELS_TOGETHER:
        raise UserError(
            f"{what} has images of {together} pixels together; {MAX_PIXELS_TOGETHER} are the most. Scale them down."
        )
    return sizes


def read_pixels(what: str, image: Image) -> PillowImage.Image:
    """In RGB. Raises UserError, which begins with `what`, for an image that is cut off or damaged."""
    try:
        with _opened(image) as file:
            file.info.pop("transparency", None)  # Pillow would warn that it is lost
            return file.convert("RGB")
    except Exception as error:  # Pillow's readers raise OSError, SyntaxError, ValueError, struct.error, …
        raise UserError(f"{what} cannot be decoded as {image.format}: {error}.") from error


def _read_size(what: str, image: Image) -> ImageSize:
    if image.format not in FORMATS:
        raise UserError(f"{what} has the format {image.format!r}; {' and '.join(FORMATS)} are read. Convert it.")
    if len(image.content) > MAX_IMAGE_BYTES:
        raise UserError(f"{what} has {len(image.content)} bytes; {MAX_IMAGE_BYTES} are the most. Scale it down.")
    try:
        with _opened(image) as file:
            size = ImageSize(file.height, file.width)
    except (PillowImage.DecompressionBombError, PillowImage.DecompressionBombWarning) as error:
        raise UserError(
            f"{what} claims to have far more pixels than the {MAX_IMAGE_PIXELS} that are the most."
        ) from error
    except Exception as error:
        raise UserError(f"{what} is not a readable {image.format} file: its bytes do not begin as one.") from error
    if size.pixels > MAX_IMAGE_PIXELS or max(size.height, size.width) > MAX_IMAGE_SIDE:
        raise UserError(
            f"{what} is {size.width} x {size.height} pixels; {MAX_IMAGE_PIXELS} pixels and {MAX_IMAGE_SIDE} a side are "
            f"the most. Scale it down."
        )
    return size


def _opened(image: Image) -> PillowImage.Image:
    """Its header is read; pixels are not."""
    return PillowImage.open(io.BytesIO(image.content), formats=[image.format.upper()])
