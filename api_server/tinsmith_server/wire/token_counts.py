"""How many tokens a training request and a sample's result hold, where rates ask for that."""

from __future__ import annotations

import zstandard
from google.protobuf.message import DecodeError
from tinsmith_rpc import wire_pb2

TOKEN_BYTES = 4
UNCOUNTED_IMAGE_TOKENS = 1024
"""Of an image whose sender does not say how many it takes: as many as a picture of 900 x 900 pixels has with Qwen."""


def trained_tokens(payload: bytes, zstd: bool, limit_bytes: int) -> int:
    """Of the inputs; of an image as many as its sender takes it for, which the worker holds it to.

    What cannot be read has none: it fails at the worker, and costs nothing there.
    """
    try:
        if zstd:
            payload = zstandard.ZstdDecompressor().decompress(payload, max_output_size=limit_bytes)
        request = wire_pb2.ForwardBackwardRequest.FromString(payload)
    except (DecodeError, zstandard.ZstdError):
        return 0
    chunks = [chunk for datum in request.data for chunk in datum.model_input]
    of_images = sum(_tokens_of_image(chunk.image) for chunk in chunks if chunk.HasField("image"))
    return sum(len(chunk.encoded_text.tokens) for chunk in chunks) // TOKEN_BYTES + of_images


def _tokens_of_image(image: wire_pb2.ImageChunk) -> int:
    return image.expected_tokens if image.expected_tokens > 0 else UNCOUNTED_IMAGE_TOKENS


def sampled_tokens(payload: bytes) -> int:
    response = wire_pb2.SampleResponse.FromString(payload)
    return sum(len(sequence.tokens) for sequence in response.sequences) // TOKEN_BYTES
