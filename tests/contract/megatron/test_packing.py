"""Ranks compute datums without padding between them, if their attention can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from support.engine.contract import CROSS_ENTROPY, compute_together, forward_backward, gradients, spec
from support.engine.datums import sft_datum
from support.nemo_rl.engines import in_process_engine
from tinsmith_trainer.engines.base import Engine, Outcome, Work
from tinsmith_trainer.engines.megatron.engine import SHARING_BYTES
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.model.gpt_model import CausalAttention
from tinsmith_trainer.torch_model.tiny_model import Family

EXACT = MegatronSettings(max_rank=8, token_budget=256)
FAST = replace(EXACT, numerics="fast")
DATUMS = [sft_datum(length, seed) for seed, length in enumerate((33, 5, 20, 1, 12))]
LAYERS = 2


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return the tokens of each call of an attention, padding included."""
    counted: list[int] = []
    plain = CausalAttention.forward

    def count(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        counted.append(query[..., 0, 0].numel())
        return plain(self, query, *args, **kwargs)

    monkeypatch.setattr(CausalAttention, "forward", count)
    return counted


def engine_with_adapters(settings: MegatronSettings, family: Family = "qwen3") -> Engine:
    engine = in_process_engine(settings, family)
    for seed, adapter in enumerate("ab"):
        engine.create_adapter(adapter, spec(engine, seed=seed))
    return engine


def assert_equal_calls(engine: Engine, other: Engine) -> None:
    found: list[Outcome] = [forward_backward(each, DATUMS) for each in (engine, other)]
    for one, two in zip(found[0].outputs, found[1].outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"], two["logprobs"], rtol=0, atol=1e-5)
    expected = gradients(other)
    for name, values in gradients(engine).items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=1e-5 * max(1.0, np.abs(expected[name]).max()))


def test_calls_that_share_a_forward_are_packed_without_padding(tokens: list[int]) -> None:
    engine = engine_with_adapters(FAST)
    tokens.clear()
    compute_together(engine, [Work(adapter, DATUMS, CROSS_ENTROPY) for adapter in "ab"])
    assert tokens == [2 * sum(datum.length for datum in DATUMS)] * LAYERS


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_packed_datums_have_the_results_of_rows(family: Family) -> None:
    assert_equal_calls(engine_with_adapters(FAST, family), engine_with_adapters(EXACT, family))


def test_calls_on_ranks_with_experts_share_no_forward() -> None:
    engine = engine_with_adapters(FAST, "qwen3-moe")
    calls = [engine.start(Work(adapter, DATUMS, CROSS_ENTROPY)) for adapter in "ab"]
    assert engine.cobatch_room(calls[0]) == 0
    assert engine.cobatch(calls) == calls[:1]


def test_a_start_prints_how_many_adapters_share_a_forward_and_their_memory() -> None:
    with capture_logs() as logs:
        engine_with_adapters(FAST)
    [printed] = [line for line in logs if line["event"] == "calls share forwards"]
    assert printed["bytes_of_a_rank"] == SHARING_BYTES
    assert printed["calls"] == SHARING_BYTES // printed["bytes_per_adapter"]


def test_ranks_that_refuse_packed_sequences_compute_rows_and_the_log_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = CausalAttention.forward

    def refuse(self: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        if packed_seq_params is not None:
            raise RuntimeError("packed sequences are not supported")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(CausalAttention, "forward", refuse)
    with capture_logs() as logs:
        engine = engine_with_adapters(FAST)
    events = {line["event"]: line for line in logs}
    assert "packed sequences are not supported" in events["the ranks cannot compute packed datums"]["error"]
    assert events["datums are padded to rows of one length"]["reason"] == "the trial at the start failed"
    assert_equal_calls(engine, engine_with_adapters(EXACT))
