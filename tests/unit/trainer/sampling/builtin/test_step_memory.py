"""The sampler's share of a GPU holds keys and values, stacks of adapters, and recorded steps."""

from __future__ import annotations

import dataclasses

import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import tiny_model
from tinsmith_trainer.sampling.builtin import BuiltinSamplerSettings, kv_memory, sampler_settings
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.sampling.builtin.kv_cache import KvGeometry
from tinsmith_trainer.sampling.builtin.steps.memory import STACK_BYTES, StepMemory, StepSizes
from tinsmith_trainer.sampling.builtin.steps.recorded import MOST_RECORDINGS

QWEN3_8B = StepSizes(layers=36, heads_per_key_head=4, vocab=151_936, element_bytes=2, rows=32, records=True)
GEOMETRY = KvGeometry(layers=36, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=torch.device("cuda"))
CONTEXT = 40_960
MB = 10**6


@given(share=st.integers(0, 1 << 40), row_bytes=st.integers(1, 1 << 40), records=st.booleans())
def test_most_of_the_share_is_for_keys_and_values(share: int, row_bytes: int, records: bool) -> None:
    steps = dataclasses.replace(QWEN3_8B, records=records).memory(share, row_bytes)
    assert 0 <= steps.nbytes <= share * 3 / 8
    assert steps.stacked_adapter_bytes <= STACK_BYTES
    assert 0 <= steps.recorded_steps <= (MOST_RECORDINGS if records else 0)
    assert bool(steps.recorded_steps) == bool(steps.recorded_bytes)


def test_a_recording_of_eight_billion_parameters_takes_a_tenth_of_a_gigabyte() -> None:
    assert QWEN3_8B.bytes_of_a_recording() // MB == 105
    assert dataclasses.replace(QWEN3_8B, rows=1).bytes_of_a_recording() // MB == 86


def test_keys_that_no_other_heads_share_are_not_repeated() -> None:
    """Transformers repeats keys and values only if several query heads share them."""
    alone = dataclasses.replace(QWEN3_8B, heads_per_key_head=1)
    assert alone.shared_bytes(1 << 40) == 32 * 151_936 * (2 + 4)
    assert QWEN3_8B.shared_bytes(36 << 20) - alone.shared_bytes(0) == 4 << 20


@pytest.mark.parametrize(
    ("free_gib", "stacked_mib", "recorded"),
    [pytest.param(64, 1024, MOST_RECORDINGS, id="80 GB"), pytest.param(8, 256, 2, id="24 GB")],
)
def test_a_start_plans_and_prints_what_the_sampler_takes(
    free_gib: int, stacked_mib: int, recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_memory, "free_bytes", lambda _device: free_gib << 30)
    with structlog.testing.capture_logs() as logs:
        found = kv_memory.kv_memory(GEOMETRY, CONTEXT, None, alone=False, sizes=QWEN3_8B)
    assert found.steps is not None
    assert (found.steps.stacked_adapter_bytes >> 20, found.steps.recorded_steps) == (stacked_mib, recorded)
    assert found.nbytes + found.steps.nbytes == free_gib << 28
    [printed] = [line for line in logs if line["event"] == "planned the sampler's memory"]
    assert printed["kv_cache_bytes"] == found.nbytes
    assert printed["stacked_adapter_bytes"] == found.steps.stacked_adapter_bytes
    assert (printed["recorded_steps"], printed["recorded_step_bytes"]) == (recorded, found.steps.recorded_bytes)


def test_the_samplers_settings_have_the_planned_limits() -> None:
    planned = kv_memory.KvMemory(1000, 10, StepMemory(stacked_adapter_bytes=7, recorded_steps=3, recorded_bytes=900))
    settings = planned.within(sampler_settings("cuda"))
    assert (settings.kv_cache_bytes, settings.longest_row_tokens) == (1000, 10)
    assert (settings.stacked_adapter_bytes, settings.recorded_steps) == (7, 3)


def test_a_cpu_has_the_default_stack() -> None:
    settings, forward = BuiltinSamplerSettings(), ForwardPass(tiny_model())
    found = kv_memory.kv_memory(forward.geometry, 64, None, alone=False, sizes=forward.step_sizes(settings))
    assert found.steps is None
    assert found.within(settings).stacked_adapter_bytes == settings.stacked_adapter_bytes


def test_the_sizes_of_a_step_are_the_models() -> None:
    config = tiny_model().model.config
    sizes = ForwardPass(tiny_model()).step_sizes(BuiltinSamplerSettings(max_rows=4))
    assert sizes == StepSizes(
        config.num_hidden_layers,
        config.num_attention_heads // config.num_key_value_heads,
        config.vocab_size,
        element_bytes=4,
        rows=4,
        records=False,
    )
