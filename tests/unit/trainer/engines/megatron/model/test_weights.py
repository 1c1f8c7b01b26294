from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_directory
from tinsmith_trainer.engines.megatron.model.weights import EMBEDDING, Checkpoint, Part, interleave_groups
from tinsmith_trainer.errors import ModelDirectoryInvalid

HIDDEN, VOCABULARY = 64, 512


@given(size=st.integers(1, 50), count=st.integers(1, 9))
def test_parts_are_all_of_a_dimension_in_order_and_none_is_wider_than_its_padding(size: int, count: int) -> None:
    parts = [Part(index, count) for index in range(count)]
    indices = [list(range(size))[part.of(size)] for part in parts]
    assert [index for part in indices for index in part] == list(range(size))
    assert all(len(held) <= part.width(size) for held, part in zip(indices, parts, strict=True))
    assert Part(0, count).width(size) * count >= size


@given(groups=st.integers(1, 4), heads=st.integers(1, 3), head_size=st.integers(1, 3))
def test_each_group_has_its_queries_then_its_key_then_its_value(groups: int, heads: int, head_size: int) -> None:
    query = [f"q{head}.{row}" for head in range(groups * heads) for row in range(head_size)]
    key, value = ([f"{kind}{group}.{row}" for group in range(groups) for row in range(head_size)] for kind in "kv")
    names = query + key + value
    rows = torch.arange(float(len(names)))[:, None].expand(-1, 2)
    fused = interleave_groups(*rows.split([len(query), len(key), len(value)]), groups, dim=0)
    transposed = interleave_groups(*rows.T.split([len(query), len(key), len(value)], dim=-1), groups, dim=-1)
    assert torch.equal(fused.T, transposed)
    wanted = [
        f"{kind}.{row}"
        for group in range(groups)
        for kind in [*(f"q{head}" for head in range(group * heads, (group + 1) * heads)), f"k{group}", f"v{group}"]
        for row in range(head_size)
    ]
    assert [names[int(row)] for row in fused[:, 0]] == wanted


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_directory(), tmp_path / "model")


def test_a_part_is_read_from_whichever_file_has_the_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, held in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in held}, directory / f"model-{number}.safetensors")
    with Checkpoint(directory) as checkpoint:
        for name in names[:4]:
            wanted = tensors[name]
            assert torch.equal(checkpoint.part(name, tuple(wanted.shape), None, Part(0, 1)), wanted)
        columns = checkpoint.part(EMBEDDING, (VOCABULARY, HIDDEN), 1, Part(1, 2))
    assert torch.equal(columns, tensors[EMBEDDING][:, HIDDEN // 2 :])


def test_a_tensor_of_another_shape_than_the_config_says_is_named(directory: Path) -> None:
    with Checkpoint(directory) as checkpoint, pytest.raises(ModelDirectoryInvalid, match=r"\(512, 64\); config.json"):
        checkpoint.part(EMBEDDING, (VOCABULARY, 2 * HIDDEN), None, Part(0, 1))


def test_a_directory_that_lacks_a_tensor_or_all_of_them_is_refused_by_name(directory: Path) -> None:
    with (
        Checkpoint(directory) as checkpoint,
        pytest.raises(ModelDirectoryInvalid, match=r"lack the tensor model\.absent\."),
    ):
        checkpoint.part("model.absent", (1,), None, Part(0, 1))
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelDirectoryInvalid, match=r"has no \*\.safetensors, which ranks read in parts"):
        Checkpoint(directory)
