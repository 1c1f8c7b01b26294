"""How many tokens a training request and a sample's result hold, where rates ask for that."""

from __future__ import annotations

from tinsmith_rpc import wire_pb2
from tinsmith_rpc.training_bodies import TOKEN_BYTES, BodyInvalid, outline_of
from tinsmith_rpc.zstd_frames import FrameInvalid, unpack


def trained_tokens(payload: bytes, unpacked_bytes: int | None = None) -> int:
    """Return the tokens of all inputs, images included. `unpacked_bytes` is the size that a zstd frame declares.

    What cannot be read, or holds more than a call may, has none: it fails at the worker, and costs nothing there.
    """
    try:
        return outline_of(payload if unpacked_bytes is None else unpack(payload, unpacked_bytes)).tokens
    except (BodyInvalid, FrameInvalid):
        return 0


def sampled_tokens(payload: bytes) -> int:
    response = wire_pb2.SampleResponse.FromString(payload)
    return sum(len(sequence.tokens) for sequence in response.sequences) // TOKEN_BYTES
