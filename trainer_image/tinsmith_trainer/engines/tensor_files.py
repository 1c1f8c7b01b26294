"""safetensors files without a copy of their tensors, and byte for byte what that library would write.

The library makes the whole file in memory, twice. Here the header is worked out from names and shapes, and the rest of
the file are views of the tensors where they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.durable_files import Pieces

HEADER_ALIGNMENT_BYTES = 8


def tensor_file(tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]) -> Pieces:
    """A file of float32 tensors. They must not change until it has been written."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    content: list[memoryview] = []
    end = 0
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype != np.float32:
            raise TypeError(f"{name} is of {tensor.dtype}; states are of float32")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (begin, end)}
        content.append(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return [_encoded(header), *content]


def _encoded(header: Mapping[str, object]) -> bytes:
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    padded = text.ljust(-(-len(text) // HEADER_ALIGNMENT_BYTES) * HEADER_ALIGNMENT_BYTES)
    return len(padded).to_bytes(8, "little") + padded
