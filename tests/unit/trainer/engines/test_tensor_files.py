"""Files that any reader of safetensors takes for the library's own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load, save
from tinsmith_trainer.engines.tensor_files import (
    SIZE_BYTES,
    is_aligned,
    memory_for_tensors,
    tensor_file,
    tensors_of,
)

Tensors = Mapping[str, NDArray[np.float32]]

CASES: dict[str, Tensors] = {
    "none": {},
    "some": {"b.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "a.weight": np.ones(5, np.float32)},
    "order": {name: np.full(2, ord(name[0]), np.float32) for name in ("b", "B", "a.10", "a.2", "é", "a")},
    "shapes": {
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.full((), 7, np.float32),
        "cube": np.ones((2, 3, 4), np.float32),
    },
    "special": {"values": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)},
}


@pytest.mark.parametrize(
    "metadata", [{"format": "pt"}, {"tinsmith": '{"message": "a \\"word\\",\\n\u00e4\u2028\x01\x7f"}'}]
)
@pytest.mark.parametrize("tensors", CASES.values(), ids=CASES)
def test_a_file_is_the_librarys_byte_for_byte(tensors: Tensors, metadata: dict[str, str]) -> None:
    """A save that a former release wrote, and no one heard of, is found again by its digests."""
    content = b"".join(tensor_file(tensors, metadata))
    assert content == save(dict(tensors), metadata)
    assert {name: (tensor.shape, tensor.tobytes()) for name, tensor in load(content).items()} == {
        name: (tensor.shape, tensor.tobytes()) for name, tensor in tensors.items()
    }


def test_tensors_of_another_type_than_float32_are_refused() -> None:
    with pytest.raises(TypeError, match="a has dtype float64"):
        tensor_file({"a": np.zeros(2)}, {})  # type: ignore[dict-item]


def test_tensors_that_are_read_are_views_and_aligned() -> None:
    """Otherwise a sampler would copy them, or compute other bits than from another source."""
    content = b"".join(tensor_file({"a": np.ones((3, 16), np.float32), "b": np.ones(32, np.float32)}, {"odd": "x" * 9}))
    memory = memory_for_tensors(content[:SIZE_BYTES], len(content))
    memory[:] = content
    read = tensors_of(memory)
    assert all(is_aligned(tensor) for tensor in read.values())
    memory[-4:] = np.float32(7).tobytes()
    assert read["b"][-1] == 7
