"""Images in the conversations of both dialects. The request holds their data, because the server fetches no URLs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith_rpc import wire_pb2

from tinsmith_server.wire.json_bodies import decode_base64

FORMATS: Mapping[str, str] = {"image/png": "png", "image/jpeg": "jpeg"}
PLACE: Mapping[str, str] = {"type": "image"}
"""The part of a message at which the chat template writes the model's token for an image."""

Images = list[wire_pb2.ImageChunk]


def image_of_url(where: str, part: Mapping[str, Any]) -> wire_pb2.ImageChunk:
    """Return the image of OpenAI's `image_url` part. Raises ValueError."""
    named = part.get("image_url")
    url = named.get("url") if isinstance(named, dict) else named
    head, has_data, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    media_type, _, encoding = head.removeprefix("data:").partition(";")
    if not head.startswith("data:") or not has_data or encoding != "base64":
        raise ValueError(f"{where}: send an image as data:image/png;base64,… because the server fetches no URLs")
    return _image(where, media_type, data)


def image_of_source(where: str, block: Mapping[str, Any]) -> wire_pb2.ImageChunk:
    """Return the image of Anthropic's `image` block. Raises ValueError."""
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64" or not isinstance(source.get("data"), str):
        raise ValueError(f"{where}: send an image with a source of type base64, because the server fetches no URLs")
    return _image(where, str(source.get("media_type")), source["data"])


class Content:
    """The content of a message: a text, or texts and places of images."""

    def __init__(self, images: Images) -> None:
        """Create an empty content. Its images are added to `images`."""
        self._images = images
        self._parts: list[Mapping[str, str]] = []

    def add_text(self, text: str) -> None:
        self._parts.append({"type": "text", "text": text})

    def add_image(self, image: wire_pb2.ImageChunk) -> None:
        self._images.append(image)
        self._parts.append(PLACE)

    def shown(self) -> str | list[Mapping[str, str]]:
        """Return the content for a chat template. Templates of models without images read only texts."""
        if PLACE in self._parts:
            return self._parts
        return "".join(part["text"] for part in self._parts)


def _image(where: str, media_type: str, data: str) -> wire_pb2.ImageChunk:
    if media_type not in FORMATS:
        raise ValueError(f"{where}: an image is {' or '.join(FORMATS)}, not {media_type[:80]!r}")
    try:
        return wire_pb2.ImageChunk(format=FORMATS[media_type], data=decode_base64(data.encode()))
    except ValueError as error:
        raise ValueError(f"{where}: the image is not valid base64: {error}") from error
