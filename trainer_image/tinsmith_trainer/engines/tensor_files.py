"""safetensors files without a copy of their tensors, and byte for byte what that library would write.

The library makes the whole file in memory, twice. Here the header is worked out from names and shapes, and the rest of
the file are views of the tensors where they are. Read, tensors are views of the file's content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.disk.durable_files import Pieces

HEADER_ALIGNMENT_BYTES = 8
SIZE_BYTES = 8
"""Of the number before the header, which is the header's own size."""
TENSOR_ALIGNMENT_BYTES = 64
"""BLAS may choose its kernel by alignment, and with it the bits of a product."""


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


def tensors_of(content: bytes | memoryview) -> dict[str, NDArray[np.float32]]:
    """Of a file that `tensor_file` made: views of its content."""
    begin = header_end(bytes(content[:SIZE_BYTES]))
    header = json.loads(bytes(content[SIZE_BYTES:begin]))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            part = content[begin + start : begin + end]
            tensors[name] = np.frombuffer(part, np.float32).reshape(entry["shape"])
    return tensors


def header_end(head: bytes) -> int:
    """Where the tensors begin in a file, by its first bytes."""
    return SIZE_BYTES + int.from_bytes(head[:SIZE_BYTES], "little")


def aligned_memory(size_bytes: int, aligned_at: int = 0) -> memoryview:
    """New memory, whose byte at this offset is aligned as tensors are. numpy asks for huge pages."""
    memory = np.empty(size_bytes + TENSOR_ALIGNMENT_BYTES, np.uint8)
    begin = -(memory.ctypes.data + aligned_at) % TENSOR_ALIGNMENT_BYTES
    return memory[begin : begin + size_bytes].data


def is_aligned(tensor: NDArray[np.float32]) -> bool:
    return tensor.ctypes.data % TENSOR_ALIGNMENT_BYTES == 0


def memory_for_tensors(head: bytes, size_bytes: int) -> memoryview:
    """For the content of a file of tensors, of which the first is aligned, and the others where sizes allow it."""
    return aligned_memory(size_bytes, header_end(head))
