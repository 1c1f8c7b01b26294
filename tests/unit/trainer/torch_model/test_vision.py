"""Images that are refused, with the reason, and images that are not; no header causes a large allocation."""

from __future__ import annotations

import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.tiny_vision import IMAGE_TOKEN, encoded, image_at, picture, vision_directory, vision_model
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.torch_model.base_model import Image
from tinsmith_trainer.torch_model.image_files import (
    MAX_IMAGE_BYTES,
    MAX_IMAGES,
    MAX_PIXELS_TOGETHER,
    ImageSize,
    read_pixels,
    read_sizes,
)
from tinsmith_trainer.torch_model.loading import load_torch_model
from tinsmith_trainer.torch_model.vision import Vision

TOKENS = np.arange(6, dtype=np.int32)
PNG, JPEG = encoded(picture()), encoded(picture(), "jpeg")


@pytest.fixture
def vision() -> Vision:
    vision = vision_model("qwen3-vl").vision
    assert vision is not None
    return vision


def png_that_claims(width: int, height: int) -> bytes:
    """Return a header that claims pixels which were never sent."""
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def test_placeholders_stand_where_the_images_were(vision: Vision) -> None:
    placed = vision.placed("Datum 0", TOKENS, [image_at(2), image_at(6, width=16, height=16)])
    eight = [IMAGE_TOKEN] * 8  # 72 x 40 becomes 64 x 32 in patches of 16
    assert placed.tolist() == [0, 1, *eight, 2, 3, 4, 5, IMAGE_TOKEN]


def test_a_directory_without_a_processor_serves_text_alone(tmp_path: Path) -> None:
    folder = shutil.copytree(vision_directory("qwen3-vl"), tmp_path / "model")
    (folder / "preprocessor_config.json").unlink()
    assert load_torch_model(str(folder)).vision is None


@pytest.mark.parametrize("content", [PNG, JPEG], ids=["png", "jpeg"])
def test_an_image_with_the_right_count_is_accepted(vision: Vision, content: bytes) -> None:
    kind = "png" if content is PNG else "jpeg"
    assert len(vision.placed("Datum 0", TOKENS, [Image(1, content, kind, expected_tokens=8)])) == len(TOKENS) + 8


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (Image(1, PNG, "webp"), "has the format 'webp'; supported are png and jpeg"),
        (Image(1, JPEG, "png"), "is not a readable png file"),
        (Image(1, b"", "png"), "is not a readable png file"),
        (Image(1, b"\0" * (MAX_IMAGE_BYTES + 1), "png"), "bytes; the limit is 16777216"),
        (Image(1, png_that_claims(60_000, 60_000), "png"), "claims to have far more pixels than the limit of 16777216"),
        (Image(1, png_that_claims(10_000, 10_000), "png"), "(claims to have far more|is 10000 x 10000) pixels"),
        (
            Image(1, png_that_claims(16_385, 1), "png"),
            "is 16385 x 1 pixels; the limit is 16777216 pixels, and 16384 a side",
        ),
        (Image(1, PNG, "png", expected_tokens=9), "has 8 tokens, but expected_tokens is 9"),
        (image_at(1, width=2100, height=10), "is refused by the model's processor: absolute aspect ratio"),
    ],
    ids=["format", "another format", "empty", "bytes", "bomb", "large", "side", "miscounted", "too long"],
)
def test_an_invalid_image_is_refused_with_a_message(vision: Vision, image: Image, sentence: str) -> None:
    with pytest.raises(UserError, match=f"^Datum 3, image 0 .*{sentence}"):
        vision.placed("Datum 3", TOKENS, [image])


@pytest.mark.parametrize(
    ("tokens", "images", "sentence"),
    [
        (TOKENS, [image_at(1), image_at(1)], "has an image directly after another one"),
        (np.array([1, IMAGE_TOKEN], np.int32), [image_at(1)], f"holds token {IMAGE_TOKEN}, which represents an image"),
        (TOKENS, [image_at(index) for index in range(MAX_IMAGES + 1)], f"has {MAX_IMAGES + 1} images"),
    ],
    ids=["neighbours", "placeholder", "too many"],
)
def test_an_invalid_combination_of_images_is_refused_with_a_message(
    vision: Vision, tokens: np.ndarray, images: list[Image], sentence: str
) -> None:
    with pytest.raises(UserError, match=f"^Datum 3 {sentence}"):
        vision.placed("Datum 3", tokens, images)


def test_the_headers_of_images_give_their_total_size() -> None:
    large = Image(0, png_that_claims(4096, 4096), "png")
    assert read_sizes("Datum 0", [large] * 4) == [ImageSize(4096, 4096)] * 4
    with pytest.raises(UserError, match=f"in total; the limit is {MAX_PIXELS_TOGETHER}"):
        read_sizes("Datum 0", [large] * 5)


@pytest.mark.parametrize("content", [PNG[:-200], JPEG[:-200], png_that_claims(8, 8)], ids=["png", "jpeg", "empty"])
def test_an_image_that_is_cut_off_is_refused_when_its_pixels_are_read(content: bytes) -> None:
    kind = "jpeg" if content.startswith(b"\xff\xd8") else "png"
    with pytest.raises(UserError, match=f"^Datum 0, image 0 cannot be decoded as {kind}"):
        read_pixels("Datum 0, image 0", Image(0, content, kind))


def test_transparency_and_palettes_become_plain_colours() -> None:
    for mode in ("RGBA", "P", "L", "LA", "1", "I;16"):
        content = encoded(picture().convert("L").convert(mode) if mode == "I;16" else picture().convert(mode))
        assert read_pixels("Datum 0", Image(0, content, "png")).mode == "RGB"
