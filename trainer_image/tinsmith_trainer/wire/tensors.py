"""The conversion of Tinker's tensors to checked arrays and back. Tensors are dense or in compressed rows (CSR).

For an invalid tensor, a UserError is raised that begins with `where`, the place of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from tinsmith_rpc import wire_pb2

from tinsmith_trainer.errors import UserError

MAX_TENSOR_BYTES = 512 * 1024 * 1024
MAX_DIMENSIONS = 8
"""The maximum number of dimensions.

No input of a loss has more than two dimensions, and multiplying a million sizes would take hours.
"""
NUMPY_DTYPES: Mapping[int, np.dtype[np.generic]] = {
    wire_pb2.FLOAT32: np.dtype("<f4"),
    wire_pb2.INT64: np.dtype("<i8"),
    wire_pb2.INT32: np.dtype("<i4"),
}
IndexArray = NDArray[np.int64]
Numbers = NDArray[np.int64] | NDArray[np.float32]


def array_of(where: str, content: bytes, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Return a flat array that is a view of the bytes."""
    if len(content) % dtype.itemsize:
        raise UserError(f"{where} has {len(content)} bytes, not a multiple of {dtype.itemsize} ({dtype.name}).")
    return np.frombuffer(content, dtype=dtype)


def dense_bytes(tensor: wire_pb2.Tensor) -> int:
    """Return the maximum size of a sparse tensor after decoding, in bytes.

    Return 0 if the tensor is dense or will be refused.
    """
    if tensor.WhichOneof("encoding") != "sparse_csr" or len(tensor.shape) != 2:
        return 0
    return max(0, math.prod(tensor.shape)) * np.dtype(np.int64).itemsize


def decode_tensor(
    where: str, tensor: wire_pb2.Tensor, *, unlisted: int = 0, most_bytes: int = MAX_TENSOR_BYTES
) -> Numbers:
    """Return a dense array of int64 or float32.

    Entries that the compressed rows do not list have the value `unlisted`. A dense tensor without a shape is a
    scalar if it has one value, and has one dimension otherwise: a message cannot tell the shape `[]` from none.
    """
    dtype = NUMPY_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise UserError(f"{where} has dtype {tensor.dtype}; float32 and int64 are understood.")
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise UserError(f"{where} has {len(tensor.shape)} dimensions; {MAX_DIMENSIONS} are the most.")
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise UserError(f"{where} has shape {list(shape)}; sizes must not be negative.")
    encoding = tensor.WhichOneof("encoding")
    if encoding == "sparse_csr":
        values = _densify(where, tensor.sparse_csr, np.full((), unlisted, dtype), shape, most_bytes)
    else:
        values = _reshape(where, array_of(where, tensor.dense, dtype), shape)
    return _finite(where, values)


def _reshape(where: str, flat: NDArray[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
    if not shape and len(flat) != 1:
        return flat
    if math.prod(shape) != len(flat):
        raise UserError(f"{where} has {len(flat)} values, but its shape {list(shape)} needs {math.prod(shape)}.")
    return flat.reshape(shape)


def _densify(
    where: str, sparse: wire_pb2.SparseCsr, unlisted: NDArray[np.generic], shape: tuple[int, ...], most_bytes: int
) -> NDArray[np.generic]:
    values = array_of(where, sparse.values, unlisted.dtype)
    crow, col = _indices(where, sparse)
    if len(shape) != 2:
        raise UserError(f"{where} is sparse with shape {list(shape)}; sparse tensors have two dimensions.")
    if math.prod(shape) * values.itemsize > most_bytes:
        raise UserError(f"{where} would take more than {most_bytes} bytes as a dense {list(shape)} tensor.")
    _check_csr(where, values, crow, col, shape)
    rows = _rows(crow)
    if len(np.unique(rows * shape[1] + col)) != len(col):
        raise UserError(f"{where} lists an entry twice.")
    dense = np.full(shape, unlisted)
    dense[rows, col] = values
    return dense


def _indices(where: str, sparse: wire_pb2.SparseCsr) -> tuple[IndexArray, IndexArray]:
    """Return the index of the first entry of each row, and the column of each entry."""
    crow = array_of(f"{where}, crow_indices", sparse.crow_indices, np.dtype("<i8"))
    col = array_of(f"{where}, col_indices", sparse.col_indices, np.dtype("<i8"))
    return crow, col  # type: ignore[return-value]


def _rows(crow: IndexArray) -> IndexArray:
    """Return the row of each entry."""
    return np.repeat(np.arange(len(crow) - 1), np.diff(crow))


def _check_csr(
    where: str, values: NDArray[np.generic], crow: IndexArray, col: IndexArray, shape: tuple[int, ...]
) -> None:
    if len(crow) != shape[0] + 1 or (len(crow) and (crow[0] != 0 or crow[-1] != len(col))) or np.any(np.diff(crow) < 0):
        raise UserError(f"{where} has crow_indices that do not fit {shape[0]} rows and {len(col)} entries.")
    if len(values) != len(col) or np.any((col < 0) | (col >= shape[1])):
        raise UserError(f"{where} has col_indices that do not fit {len(values)} values and {shape[1]} columns.")


def _finite(where: str, values: NDArray[np.generic]) -> Numbers:
    if values.dtype.kind == "i":
        return values.astype(np.int64, copy=False)
    floats = values.astype(np.float32, copy=False)
    if not np.isfinite(floats).all():
        position = int(np.flatnonzero(~np.isfinite(floats.ravel()))[0])
        raise UserError(f"{where} holds {floats.ravel()[position]} at position {position}; values must be finite.")
    return floats


def encode_dense(array: NDArray[np.generic]) -> wire_pb2.Tensor:
    """Encode integers as int64 and floats as float32, as the SDK does."""
    dtype = wire_pb2.INT64 if array.dtype.kind == "i" else wire_pb2.FLOAT32
    content = np.ascontiguousarray(array, NUMPY_DTYPES[dtype]).tobytes()
    return wire_pb2.Tensor(dense=content, dtype=dtype, shape=array.shape)


def encode_like(pattern: wire_pb2.Tensor, answer: NDArray[np.float32]) -> wire_pb2.Tensor:
    """Encode one value for each entry of a decoded tensor, in the tensor's layout.

    If the layout is sparse, only listed entries have values.
    """
    if pattern.WhichOneof("encoding") != "sparse_csr":
        return encode_dense(answer)
    crow, col = _indices("", pattern.sparse_csr)
    listed = np.ascontiguousarray(answer[_rows(crow), col], "<f4")
    return wire_pb2.Tensor(
        sparse_csr=wire_pb2.SparseCsr(
            values=listed.tobytes(),
            crow_indices=pattern.sparse_csr.crow_indices,
            col_indices=pattern.sparse_csr.col_indices,
        ),
        dtype=wire_pb2.FLOAT32,
        shape=pattern.shape,
    )
