from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sampler.jobs import job, prompt_of, submit
from tinsmith_trainer.errors import ServerError, UserError
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.kv_cache import RowGeometry
from tinsmith_trainer.sampling.builtin.kv_memory import (
    CPU_BYTES,
    GIB,
    SHORTEST_ROW_TOKENS,
    KvMemory,
    cgroup_room_bytes,
    chosen_bytes,
    free_bytes,
    kv_memory,
    shared_bytes,
)
from tinsmith_trainer.sampling.builtin.model_cache.states import StateGeometry
from tinsmith_trainer.torch_model.loading import TorchModel

ROW_BYTES = 2 * 2 * 2 * 16 * 4 * 1024
"""Of the tiny model: layers, keys and values, heads, their length, float32, and the length that is served."""

sizes = st.integers(1, 1 << 45)


@given(token=st.integers(1, 1 << 24), free=sizes, alone=st.booleans(), device=st.sampled_from(["cpu", "cuda"]))
def test_a_whole_context_fits_by_default_if_half_of_the_free_memory_is_enough(
    token: int, free: int, alone: bool, device: str
) -> None:
    share, context = shared_bytes(device, free, alone=alone), 2048
    if max(share, free // 2) < SHORTEST_ROW_TOKENS * token:
        with pytest.raises(ServerError, match="--no-sampling"):
            chosen_bytes(None, of_tokens(token), context, free, share)
    elif share >= SHORTEST_ROW_TOKENS * token:
        chosen = chosen_bytes(None, of_tokens(token), context, free, share)
        assert share <= chosen <= free
        assert chosen >= context * token or context * token > free // 2


def test_a_context_that_no_memory_holds_is_served_in_part(model: TorchModel) -> None:
    tokens = 100
    memory = kv_memory(*of(model), ROW_BYTES // 1024 * tokens, alone=True)
    settings = BuiltinSamplerSettings(kv_cache_bytes=memory.nbytes, longest_row_tokens=memory.longest_row_tokens)
    with closing(BuiltinSampler(model, settings)) as sampler:
        whole = submit(sampler, job(prompt_of(60), max_tokens=None)).get()
        assert [len(sequence.tokens) for sequence in whole.sequences] == [tokens - 60]
        refused = submit(sampler, job(prompt_of(tokens))).get()
        assert isinstance(refused.error, UserError)
        assert f"memory for {tokens} tokens" in str(refused.error)


def test_eight_billion_parameters_on_a_gpu_have_many_rows() -> None:
    """Qwen3-8B keeps 144 KiB a token. A fixed 2 GiB held one row of 2,048 tokens to a batch."""
    token = 144 * 1024
    free = (80 - 16) * GIB
    shared = chosen_bytes(None, of_tokens(token), 2048, free, shared_bytes("cuda", free, alone=False))
    assert shared // (2048 * token) == 56
    assert shared_bytes("cuda", free, alone=True) > 3 * shared


def test_a_host_gives_a_bounded_part() -> None:
    assert shared_bytes("cpu", 4 * GIB, alone=True) == GIB
    assert shared_bytes("cpu", 1 << 50, alone=True) == CPU_BYTES


def test_memory_below_the_shortest_row_is_refused_with_the_required_size(model: TorchModel) -> None:
    least = ROW_BYTES // 1024 * SHORTEST_ROW_TOKENS
    with pytest.raises(ServerError, match=f"take {least} bytes.*--kv-cache-bytes allows is {least - 1}"):
        kv_memory(*of(model), least - 1, alone=False)
    assert kv_memory(*of(model), least, alone=False) == KvMemory(least, SHORTEST_ROW_TOKENS)


def of_tokens(bytes_per_token: int) -> StateGeometry:
    return StateGeometry(bytes_per_token, 0, torch.device("cpu"))


def of(model: TorchModel) -> tuple[RowGeometry, int]:
    return ForwardPass(model).geometry, model.info.max_sequence_length


def cgroup(tmp_path: Path, limit: str) -> Path:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 200\n")
    return tmp_path


def test_a_containers_limit_counts_without_the_file_pages_that_may_go(tmp_path: Path) -> None:
    assert cgroup_room_bytes(cgroup(tmp_path, "1000")) == 500


def test_without_a_limit_the_machine_alone_counts(tmp_path: Path) -> None:
    assert cgroup_room_bytes(cgroup(tmp_path, "max")) is None
    assert cgroup_room_bytes(tmp_path / "none") is None
    assert free_bytes(torch.device("cpu")) > 0
