"""Safetensors files, which are written without a copy of the tensors. The bytes are the same as in the library's files.

The library builds the whole file in memory, twice. This module computes the header from names and shapes; the rest of
the file consists of views of the tensors. Reading a file returns tensors that are views of the file's content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.disk.durable_files import Pieces

HEADER_ALIGNMENT_BYTES = 8
SIZE_BYTES = 8
"""The size of the field at the beginning of a file, which holds the header's size."""
TENSOR_ALIGNMENT_BYTES = 64
"""The alignment of tensors. BLAS may choose a kernel by the alignment, and another kernel gives other bits."""


def tensor_file(tensors: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, str]) -> Pieces:
    """Return the content of a file of float32 tensors. The tensors must not change until the file has been written."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    content: list[memoryview] = []
    end = 0
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype != np.float32:
            raise TypeError(f"{name} has dtype {tensor.dtype}; states are float32")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (begin, end)}
        content.append(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return [_encoded(header), *content]


def _encoded(header: Mapping[str, object]) -> bytes:
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    padded = text.ljust(-(-len(text) // HEADER_ALIGNMENT_BYTES) * HEADER_ALIGNMENT_BYTES)
    return len(padded).to_bytes(8, "little") + padded


def tensors_of(content: bytes | memoryview) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a file from `tensor_file`, as views of the file's content."""
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
    """Return the offset of the first tensor in a file, from the file's first bytes."""
    return SIZE_BYTES + int.from_bytes(head[:SIZE_BYTES], "little")


def aligned_memory(size_bytes: int, aligned_at: int = 0) -> memoryview:
    """Return new memory, in huge pages, in which byte `aligned_at` has the alignment of tensors."""
    memory = np.empty(size_bytes + TENSOR_ALIGNMENT_BYTES, np.uint8)
    begin = -(memory.ctypes.data + aligned_at) % TENSOR_ALIGNMENT_BYTES
    return memory[begin : begin + size_bytes].data


def is_aligned(tensor: NDArray[np.float32]) -> bool:
    return tensor.ctypes.data % TENSOR_ALIGNMENT_BYTES == 0


def memory_for_tensors(head: bytes, size_bytes: int) -> memoryview:
    """Return memory for a file.

    The first tensor is aligned; later tensors are aligned, too, if the sizes of the tensors allow it.
    """
    return aligned_memory(size_bytes, header_end(head))
