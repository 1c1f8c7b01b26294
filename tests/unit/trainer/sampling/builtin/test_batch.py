from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.sampling.builtin import BuiltinSamplerSettings
from tinsmith_trainer.sampling.builtin.adapters import BASE_MODEL, AdapterShape, LoadedAdapter
from tinsmith_trainer.sampling.builtin.batch import BatchPlan
from tinsmith_trainer.sampling.builtin.kv_cache import KvGeometry
from tinsmith_trainer.torch_model.lora import OwnDelta, StackedDelta

GEOMETRY = KvGeometry(layers=28, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=torch.device("cpu"))
CONTEXT = 40_960
PLAN = BatchPlan(GEOMETRY, BuiltinSamplerSettings(), CONTEXT)
STACKED = BatchPlan(GEOMETRY, BuiltinSamplerSettings(deterministic=True), CONTEXT)
EIGHT_MILLION = StackedDelta(torch.zeros(1, 8, 1 << 20), torch.zeros(1, 8, 8), torch.ones(1, 1, 1))
OWN = OwnDelta(EIGHT_MILLION.lora_A[0], EIGHT_MILLION.lora_B[0], 1.0)
BIG = LoadedAdapter("big", 7, AdapterShape(8, ("m",)), {"m": EIGHT_MILLION}, {"m": OWN})


@given(st.integers(0, CONTEXT - 1))
def test_a_batch_holds_its_rows_next_position_and_wastes_less_than_half(position: int) -> None:
    extent = PLAN.key(position, BASE_MODEL).extent
    assert position < extent <= CONTEXT
    assert extent <= max(256, 2 * (position + 1))


@given(st.integers(1, CONTEXT), st.integers(0, 2**36), st.sampled_from([1, 8, 32]))
def test_rows_are_a_power_of_two_within_a_quarter_of_the_memory(extent: int, memory: int, max_rows: int) -> None:
    settings = BuiltinSamplerSettings(kv_cache_bytes=max(1, memory), max_rows=max_rows)
    plan = BatchPlan(GEOMETRY, settings, CONTEXT)
    rows = plan.rows(extent)
    assert 1 <= rows <= max_rows
    assert rows & (rows - 1) == 0
    assert rows == 1 or plan.nbytes(extent) <= memory // 4


def test_stacked_rows_meet_in_a_batch_by_shape_not_by_adapter() -> None:
    twin = dataclasses.replace(BIG, serial=8)
    settings = BuiltinSamplerSettings(deterministic=True, stacked_adapter_bytes=1 << 40)
    roomy = BatchPlan(GEOMETRY, settings, CONTEXT)
    assert roomy.key(5, BIG) == roomy.key(200, twin)
    assert roomy.key(5, BIG) != roomy.key(5, BASE_MODEL)


def test_an_adapter_too_large_to_copy_per_row_has_batches_of_its_own() -> None:
    twin = dataclasses.replace(BIG, serial=8)
    assert STACKED.key(5, BIG) != STACKED.key(5, twin)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_rows", 0),
        ("max_rows", 12),
        ("prefill_block_tokens", 0),
        ("prefill_forward_tokens", 0),
        ("prefill_tokens_per_step", 0),
        ("kv_cache_bytes", 0),
        ("prefix_cache_bytes", -1),
        ("stacked_adapter_bytes", -1),
        ("recorded_steps", -1),
    ],
)
def test_a_setting_without_sense_is_refused(setting: str, value: int) -> None:
    with pytest.raises(ValueError, match=setting):
        BuiltinSamplerSettings(**{setting: value})
