"""The image inputs of a vision model: the number of tokens of each image, and the inputs of a forward with images.

The image processor in the model's directory creates the pixels, always in the variant with Pillow and numpy, so that a
GPU worker and a CPU worker get the same bits. Each image is replaced by placeholder tokens of the model: one token for
each feature from the vision tower. The tokens that a chat format puts before and after an image are text, and belong to
the request.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from PIL import Image as PillowImage
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedModel

from tinsmith_trainer.errors import UserError
from tinsmith_trainer.torch_model.base_model import Image
from tinsmith_trainer.torch_model.image_files import ImageSize, read_pixels, read_sizes

log = structlog.get_logger(__name__)

PROBE_SIZES = (ImageSize(40, 72), ImageSize(96, 56))
TOKEN_TYPE_NAMES = ("mm_token_type_ids", "token_type_ids")
"""The names that models use for the tensor that marks image tokens."""
IMAGE_TOKEN_TYPE = 1


class VisionUnsupported(Exception):
    """An error for a model that takes no images, or takes images in an unsupported way.

    The message gives the reason.
    """


class Vision:
    """A model's image processor and the placeholder token for images. Raises VisionUnsupported."""

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        self._sees: Any = model.base_model
        self._image_token = _image_token(model)
        self._dtype, self._device = model.dtype, model.device
        self._taken = set(inspect.signature(self._sees.forward).parameters)
        try:
            self._processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
        except Exception as error:  # OSError, ValueError, ImportError, …
            raise VisionUnsupported(f"its processor cannot be loaded: {error}") from error
        self._tokens_of_any = None if _counts_patches(self._processor) else self._fixed_number()
        self._try()

    def placed(self, what: str, tokens: NDArray[np.int32], images: Sequence[Image]) -> NDArray[np.int32]:
        """Return text tokens with placeholder tokens at the positions of the images. No pixels are decoded.

        Raises UserError, which begins with `what`, for images that are refused or that do not have the expected number
        of tokens.
        """
        if self._image_token in tokens:
            raise UserError(
                f"{what} holds token {self._image_token}, which represents an image; send images only as chunks."
            )
        sizes = read_sizes(what, images)
        placeholders = [
            np.full(self._checked_number(f"{what}, image {index}", image, size), self._image_token, np.int32)
            for index, (image, size) in enumerate(zip(images, sizes, strict=True))
        ]
        cuts = [image.before_token for image in images]
        if len(set(cuts)) < len(cuts):
            raise UserError(f"{what} has an image directly after another one; put the model's own tokens between them.")
        parts = np.split(tokens, cuts)
        return np.concatenate(
            [parts[0], *(part for pair in zip(placeholders, parts[1:], strict=True) for part in pair)]
        )

    def inputs(self, what: str, tokens: NDArray[np.int32], images: Sequence[Image]) -> dict[str, Tensor]:
        """Return a forward's additional inputs for `placed` tokens of one row. Raises UserError for damaged images."""
        pictures = [read_pixels(f"{what}, image {index}", image) for index, image in enumerate(images)]
        inputs = self._processed(what, pictures)
        for name in TOKEN_TYPE_NAMES:
            if name in self._taken:
                types = torch.from_numpy(np.where(tokens == self._image_token, IMAGE_TOKEN_TYPE, 0))
                inputs[name] = types.unsqueeze(0).to(self._device)
        return inputs

    def _processed(self, what: str, pictures: Sequence[PillowImage.Image]) -> dict[str, Tensor]:
        try:
            processed = self._processor(images=list(pictures), return_tensors="pt")
        except ValueError as error:
            raise UserError(f"{what} has an image that the model's processor refuses: {error}.") from error
        return {name: self._moved(tensor) for name, tensor in processed.items() if name in self._taken}

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else tensor.dtype)

    def _checked_number(self, what: str, image: Image, size: ImageSize) -> int:
        try:
            number = self._number(size)
        except ValueError as error:
            raise UserError(f"{what} is refused by the model's processor: {error}.") from error
        if image.expected_tokens not in (None, number):
            raise UserError(
                f"{what} has {number} tokens, but expected_tokens is {image.expected_tokens}: it was counted for "
                f"another model, or scaled since. Omit expected_tokens, or count with this model's processor."
            )
        return number

    def _number(self, size: ImageSize) -> int:
        """Return the number of placeholder tokens. Raises ValueError for a shape that the processor refuses."""
        if self._tokens_of_any is not None:
            return self._tokens_of_any
        patches = self._processor.get_number_of_image_patches(size.height, size.width, {})
        return int(patches // self._processor.merge_size**2)

    def _fixed_number(self) -> int:
        """Return the number of tokens that every image has, for a model that scales all images to one size."""
        shapes = {self._blank(size)["pixel_values"].shape for size in PROBE_SIZES}
        if len(shapes) > 1:
            raise VisionUnsupported("its processor does not report how many tokens it makes of an image")
        return self._features(PROBE_SIZES[0])

    def _try(self) -> None:
        """Run one image through the vision tower, and compare the number of features with the number of tokens."""
        size = PROBE_SIZES[0]
        if self._tokens_of_any is None and (made := self._features(size)) != (counted := self._number(size)):
            raise VisionUnsupported(f"its vision tower makes {made} features for an image of {counted} tokens")

    def _blank(self, size: ImageSize) -> dict[str, Tensor]:
        return self._processed("The trial", [PillowImage.new("RGB", (size.width, size.height))])

    @torch.no_grad()
    def _features(self, size: ImageSize) -> int:
        output = self._sees.get_image_features(**self._blank(size)).pooler_output
        return int(sum(features.numel() // features.shape[-1] for features in output))


def vision_of(model: PreTrainedModel, directory: Path) -> Vision | None:
    """Return the model's vision.

    Return None for a text model, and, with a log line, for a model with unsupported images.
    """
    if getattr(model.config, "vision_config", None) is None:
        return None
    try:
        return Vision(model, directory)
    except Exception as error:  # a processor or vision tower may raise anything
        log.warning("images are refused; the model serves text only", model=type(model).__name__, why=str(error))
        return None


def _image_token(model: PreTrainedModel) -> int:
    token = getattr(model.config, "image_token_id", None)
    if token is None or not hasattr(model.base_model, "get_image_features"):
        raise VisionUnsupported("it does not represent images as tokens")
    return int(token)


def _counts_patches(processor: Any) -> bool:
    return hasattr(processor, "get_number_of_image_patches") and hasattr(processor, "merge_size")
