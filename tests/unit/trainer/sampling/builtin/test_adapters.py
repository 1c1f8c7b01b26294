from __future__ import annotations

import pytest
import torch
from support.sampler.jobs import random_adapter
from tinsmith_trainer.sampling.builtin.adapters import (
    BASE_MODEL,
    AdapterShape,
    LoadedAdapter,
    RowAdapters,
    load_adapter,
    padded_rank,
)
from tinsmith_trainer.torch_model.loading import TorchModel

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


def test_versions_are_never_confused(model: TorchModel) -> None:
    assert len({loaded(model).serial, loaded(model).serial, BASE_MODEL.serial}) == 3


def test_the_base_model_routes_nothing() -> None:
    assert BASE_MODEL.shape == AdapterShape(0, ())
    assert RowAdapters(4).route([BASE_MODEL, None, BASE_MODEL, None], 4) == {}


def test_one_adapter_in_all_rows_is_not_copied(model: TorchModel) -> None:
    adapter = loaded(model)
    delta = RowAdapters(4).route([None, adapter, adapter, None], 4)[UNEMBED]
    assert delta.lora_A.shape[0] == 4
    assert delta.lora_A.data_ptr() == adapter.deltas[UNEMBED].lora_A.data_ptr()


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
