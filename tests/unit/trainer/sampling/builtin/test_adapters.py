from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sampler.jobs import random_adapter
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.engines.tensor_files import (
    SIZE_BYTES,
    aligned_memory,
    memory_for_tensors,
    tensor_file,
    tensors_of,
)
from tinsmith_trainer.sampling.builtin.adapters import (
    BASE_MODEL,
    LoadedAdapter,
    RowAdapters,
    load_adapter,
    moves_into_runs,
    padded_rank,
    route_by_products,
)
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.lora import apply_delta

UNEMBED = "lm_head"


def loaded(model: TorchModel, rank: int = 8, seed: int = 0) -> LoadedAdapter:
    state = random_adapter(model, rank=rank, seed=seed, families=("unembed",))
    return load_adapter(f"seed-{seed}", state, model.layers, model.device)


@pytest.mark.parametrize(("rank", "padded"), [(1, 8), (8, 8), (9, 32), (32, 32), (33, 128), (128, 128), (200, 200)])
def test_ranks_are_padded_to_few_sizes(rank: int, padded: int) -> None:
    assert padded_rank(rank) == padded


def test_an_adapter_is_padded_with_zeros_and_scaled_by_its_own_rank(model: TorchModel) -> None:
    state = random_adapter(model, rank=10, families=("unembed",))
    delta = load_adapter("ten", state, model.layers, model.device).deltas[UNEMBED]
    weights = [torch.from_numpy(state.tensors[f"weights/{UNEMBED}.lora_{side}"]) for side in "AB"]
    assert delta.lora_A.shape == (1, 32, 64)
    assert torch.equal(delta.lora_A[0, :10], weights[0])
    assert torch.equal(delta.lora_B[0, :, :10], weights[1])
    assert not delta.lora_A[0, 10:].any()
    assert not delta.lora_B[0, :, 10:].any()
    assert delta.scale.item() == pytest.approx(3.2)


def as_read(state: AdapterState) -> AdapterState:
    file = b"".join(tensor_file(state.tensors, {}))
    memory = memory_for_tensors(file[:SIZE_BYTES], len(file))
    memory[:] = file
    return replace(state, tensors=tensors_of(memory))


def test_weights_of_a_rank_that_is_not_padded_stay_where_they_were_read(model: TorchModel) -> None:
    state = as_read(random_adapter(model, rank=32, families=("unembed",)))
    adapter = load_adapter("as read", state, model.layers, model.device)
    places = [state.tensors[f"weights/{UNEMBED}.lora_{side}"].ctypes.data for side in "AB"]
    for delta in (adapter.deltas[UNEMBED], adapter.own[UNEMBED]):
        assert [delta.lora_A.data_ptr(), delta.lora_B.data_ptr()] == places


def test_weights_that_lie_askew_or_may_not_be_written_are_copied(model: TorchModel) -> None:
    """Products of what lies otherwise in memory may have other bits."""
    state = random_adapter(model, rank=32, families=("unembed",))
    name = f"weights/{UNEMBED}.lora_A"
    tensor = state.tensors[name]
    askew = aligned_memory(tensor.nbytes + 4)[4:]
    askew[:] = tensor.tobytes()
    shapes = {"askew": np.frombuffer(askew, np.float32), "read-only": np.frombuffer(tensor.tobytes(), np.float32)}
    for found in shapes.values():
        moved = replace(state, tensors={**state.tensors, name: found.reshape(tensor.shape)})
        lora_A = load_adapter("moved", moved, model.layers, model.device).own[UNEMBED].lora_A
        assert lora_A.data_ptr() != found.ctypes.data
        assert torch.equal(lora_A, torch.from_numpy(tensor))


def test_each_row_gets_its_adapter_as_rows_change_hands(model: TorchModel) -> None:
    a, b, c = (loaded(model, rank=rank, seed=rank) for rank in (2, 5, 8))
    rows = RowAdapters(3)
    for adapters in ([a, b, c], [b, b, c], [b, None, a], [c, c, c], [a, c, None], [a, b]):
        delta = rows.route(adapters, len(adapters))[UNEMBED]
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                assert torch.equal(delta.lora_A[row], adapter.deltas[UNEMBED].lora_A[0])
                assert torch.equal(delta.lora_B[row], adapter.deltas[UNEMBED].lora_B[0])
                assert torch.equal(delta.scale[row], adapter.deltas[UNEMBED].scale[0])


def test_in_bfloat16_the_scale_is_multiplied_before_the_weights_are_rounded(model: TorchModel) -> None:
    state = replace(random_adapter(model, seed=1, rank=3), lora=LoraSpec(rank=3, alpha=10.0, seed=1))
    exact, rounded = (
        load_adapter("a", state, model.layers, model.device, dtype).own[UNEMBED]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert rounded.scale == 1.0
    torch.testing.assert_close(rounded.lora_B.float(), exact.lora_B * exact.scale, rtol=2**-8, atol=0)


def test_products_of_runs_are_those_of_stacked_rows(model: TorchModel) -> None:
    a, b, c = (loaded(model, rank=rank, seed=rank) for rank in (2, 8, 20))
    x, base = torch.randn(6, 1, 64), model.layers[UNEMBED].base
    route = route_by_products([(a, 1), (b, 3), (BASE_MODEL, 1), (c, 1)], [UNEMBED])
    each = [
        apply_delta(row[None], base, one.deltas[UNEMBED])
        for one, row in zip((a, b, b, b, c), x[[0, 1, 2, 3, 5]], strict=True)
    ]
    expected = torch.cat([*each[:4], base(x[4:5]), each[4]])
    torch.testing.assert_close(apply_delta(x, base, route[UNEMBED]), expected)


@given(st.lists(st.none() | st.integers(0, 4), max_size=20))
def test_rows_move_into_runs(groups: list[int | None]) -> None:
    after = list(groups)
    moves = moves_into_runs(groups)
    for source, _ in moves:
        after[source] = None
    for source, target in moves:
        assert after[target] is None
        after[target] = groups[source]
    used = sorted(group for group in groups if group is not None)
    assert after == [*used, *[None] * (len(groups) - len(used))]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.data())
def test_at_most_one_row_of_each_adapter_moves_after_a_row_left(groups: list[int], data: st.DataObject) -> None:
    rows: list[int | None] = [*sorted(groups)]
    rows[data.draw(st.integers(0, len(rows) - 1))] = None
    assert len(moves_into_runs(rows)) <= len(set(groups))
