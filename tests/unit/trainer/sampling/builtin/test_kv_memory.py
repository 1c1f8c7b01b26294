from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.sampling.builtin.kv_memory import (
    CPU_BYTES,
    GIB,
    cgroup_room_bytes,
    chosen_bytes,
    free_bytes,
    kv_memory_bytes,
    shared_bytes,
)
from tinsmith_trainer.torch_model.loading import TorchModel

ROW_BYTES = 2 * 2 * 2 * 16 * 4 * 1024
"""Of the tiny model: layers, keys and values, heads, their length, float32, and the length that is served."""

sizes = st.integers(1, 1 << 45)


@given(row=sizes, free=sizes, alone=st.booleans(), device=st.sampled_from(["cpu", "cuda"]))
def test_without_a_word_a_row_of_full_length_fits_and_no_more_is_taken_than_is_free(
    row: int, free: int, alone: bool, device: str
) -> None:
    share = shared_bytes(device, free, alone=alone)
    if row > free:
        with pytest.raises(ServerError, match="Lower --max-sequence-length"):
            chosen_bytes(None, row, 2048, free, share)
    else:
        assert row <= chosen_bytes(None, row, 2048, free, share) <= free


def test_eight_billion_parameters_on_a_gpu_have_many_rows() -> None:
    """Qwen3-8B keeps 144 KiB a token. A fixed 2 GiB held one row of 2,048 tokens to a batch."""
    row = 2048 * 144 * 1024
    free = (80 - 16) * GIB
    beside = chosen_bytes(None, row, 2048, free, shared_bytes("cuda", free, alone=False))
    assert beside // row == 56
    assert shared_bytes("cuda", free, alone=True) > 3 * beside


def test_a_host_gives_a_bounded_part() -> None:
    assert shared_bytes("cpu", 4 * GIB, alone=True) == GIB
    assert shared_bytes("cpu", 1 << 50, alone=True) == CPU_BYTES


def test_what_the_operator_says_holds(model: TorchModel) -> None:
    assert kv_memory_bytes(model, ROW_BYTES, alone=False) == ROW_BYTES
    assert kv_memory_bytes(model, 1 << 50, alone=True) == 1 << 50


def test_too_little_for_one_row_is_refused_with_what_it_takes(model: TorchModel) -> None:
    with pytest.raises(ServerError, match=f"1024 tokens.*--kv-cache-bytes allows.*{ROW_BYTES} bytes at least"):
        kv_memory_bytes(model, ROW_BYTES - 1, alone=False)


def cgroup(tmp_path: Path, limit: str) -> Path:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 200\n")
    return tmp_path


def test_a_containers_limit_counts_without_the_file_pages_that_may_go(tmp_path: Path) -> None:
    assert cgroup_room_bytes(cgroup(tmp_path, "1000")) == 500


def test_a_container_that_is_full_has_nothing(tmp_path: Path) -> None:
    assert cgroup_room_bytes(cgroup(tmp_path, "400")) == 0


def test_without_a_limit_the_machine_alone_counts(tmp_path: Path) -> None:
    assert cgroup_room_bytes(cgroup(tmp_path, "max")) is None
    assert cgroup_room_bytes(tmp_path / "none") is None
    assert free_bytes(torch.device("cpu")) > 0
