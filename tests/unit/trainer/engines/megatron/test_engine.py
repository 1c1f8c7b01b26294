"""The engine's calls to its ranks, and its handling of their failures. The contract tests its mathematics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.contract import CROSS_ENTROPY, forward_backward
from support.engine.datums import sft_datum, with_inputs
from tinsmith_trainer.engines.base import AdamParams, AdapterState, Datum, LoraSpec, LossSpec, Work
from tinsmith_trainer.engines.export import BaseFiles
from tinsmith_trainer.engines.megatron import engine as engine_module
from tinsmith_trainer.engines.megatron.engine import MegatronEngine
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import RankGroup, RanksFailed, RanksLost
from tinsmith_trainer.engines.megatron.step.tensor_parts import TensorPart
from tinsmith_trainer.errors import CheckpointInvalid, ServerError, TrainerError, UserError
from tinsmith_trainer.torch_model.base_model import BaseModelInfo
from typing_extensions import override

INFO = BaseModelInfo("model", "Qwen3ForCausalLM", "revision", vocab_size=64, max_sequence_length=32)
A, B = (8, 6), (10, 8)
MODULE = "model.layers.0.self_attn.q_proj"
LORA = LoraSpec(rank=4, alpha=32.0, seed=1)


class RecordedGroup(RankGroup):
    """A fake that records every call, and fails at the calls that the test names."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.layout = Parallelism(2)
        self.failure: Exception | None = None

    @property
    @override
    def parallelism(self) -> Parallelism:
        return self.layout

    @override
    def all(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        if self.failure is not None:
            raise self.failure
        if method == "ts_parts":
            return [(TensorPart(f"{MODULE}.lora_A", A, None, A), TensorPart(f"{MODULE}.lora_B", B, None, B))] * 2
        return [1.5] * 2

    @override
    def sharded(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        return self.all(method, *args)

    @override
    def close(self) -> None:
        self.calls.append("close")


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def ranks() -> RecordedGroup:
    return RecordedGroup()


@pytest.fixture
def engine(ranks: RecordedGroup, monkeypatch: pytest.MonkeyPatch) -> MegatronEngine:
    def end(failure: str) -> None:
        raise Ended(failure)

    monkeypatch.setattr(engine_module, "end_process", end)
    files = BaseFiles(Path("model"), "model", torch.float32)
    engine = MegatronEngine("nemo-rl", ranks, files, INFO, MegatronSettings(adapter_slots=2, max_rank=8))
    engine.create_adapter("a", LORA)
    ranks.calls.clear()
    return engine


@pytest.mark.parametrize(
    ("datums", "loss"),
    [
        ([], CROSS_ENTROPY),
        ([sft_datum(33)], CROSS_ENTROPY),
        ([with_inputs(sft_datum(4), target_tokens=[0, 1, 2, 64])], CROSS_ENTROPY),
        ([with_inputs(sft_datum(4), weights=[1.0, np.nan, 1.0, 1.0])], CROSS_ENTROPY),
        ([sft_datum(4)], LossSpec("no_such_loss")),
        ([sft_datum(4)], LossSpec("importance_sampling")),
    ],
    ids=["no-datum", "too-long", "unknown-token", "not-finite", "unknown-loss", "missing-input"],
)
def test_no_rank_sees_a_bad_call(
    engine: MegatronEngine, ranks: RecordedGroup, datums: list[Datum], loss: LossSpec
) -> None:
    with pytest.raises(UserError):
        engine.start(Work("a", datums, loss))
    assert ranks.calls == []


@pytest.mark.parametrize(
    "lora", [LoraSpec(9, 32.0, 1), LoraSpec(4, 32.0, 2**64), LoraSpec(4, 32.0, 1, train_attn=False)]
)
def test_no_rank_sees_a_bad_adapter(engine: MegatronEngine, ranks: RecordedGroup, lora: LoraSpec) -> None:
    with pytest.raises(UserError):
        engine.create_adapter("b", lora)
    assert ranks.calls == []


def test_no_rank_sees_bad_hyperparameters_or_states_or_unknown_adapters(
    engine: MegatronEngine, ranks: RecordedGroup
) -> None:
    with pytest.raises(UserError, match="beta1"):
        engine.optim_step("a", AdamParams(learning_rate=1e-3, beta1=1.0))
    with pytest.raises(CheckpointInvalid, match="lacks"):
        engine.load_state("a", AdapterState(LORA, 0, {}), with_optimizer=True)
    for call in (engine.state, engine.clear_gradients):
        with pytest.raises(TrainerError, match="not loaded"):
            call("unknown")
    engine.drop("unknown")
    assert ranks.calls == []


def test_a_state_of_a_rank_beyond_what_ranks_have_room_for_says_what_to_set(
    engine: MegatronEngine, ranks: RecordedGroup
) -> None:
    state = AdapterState(LoraSpec(9, 32.0, 1), 0, {})
    with pytest.raises(ServerError, match=r"has rank 9, .* up to 8: .* Set it to at least 9\."):
        engine.load_state("a", state, with_optimizer=True)
    assert ranks.calls == []


def test_a_lost_rank_ends_the_process(engine: MegatronEngine, ranks: RecordedGroup) -> None:
    ranks.failure = RanksLost("rank 1 is gone")
    for call in (
        lambda: forward_backward(engine, [sft_datum(4)]),
        lambda: engine.optim_step("a", AdamParams(learning_rate=1e-3)),
        lambda: engine.state("a"),
        lambda: engine.create_adapter("b", LORA),
        lambda: engine.drop("a"),
    ):
        with pytest.raises(Ended, match="lost"):
            call()


def test_a_computation_that_fails_on_all_ranks_fails_its_call(engine: MegatronEngine, ranks: RecordedGroup) -> None:
    ranks.failure = RanksFailed("out of memory")
    with pytest.raises(
        ServerError, match=r"^The computation failed in this worker, and the model is unchanged: out of memory$"
    ):
        forward_backward(engine, [sft_datum(4)])


@pytest.mark.parametrize("layout", [Parallelism(2, pipeline=2), Parallelism(2, expert=2)], ids=["stages", "experts"])
def test_a_computation_that_fails_on_ranks_that_wait_for_each_other_ends_the_process_since_they_may_be_out_of_step(
    engine: MegatronEngine, ranks: RecordedGroup, layout: Parallelism
) -> None:
    ranks.layout, ranks.failure = layout, RanksFailed("out of memory")
    with pytest.raises(Ended, match="lost"):
        forward_backward(engine, [sft_datum(4)])


def test_a_step_that_fails_on_all_ranks_ends_the_process_since_it_may_have_left_something(
    engine: MegatronEngine, ranks: RecordedGroup
) -> None:
    ranks.failure = RanksFailed("out of memory")
    with pytest.raises(Ended):
        engine.optim_step("a", AdamParams(learning_rate=1e-3))


def test_a_norm_that_is_not_finite_is_the_users_error_and_no_step(engine: MegatronEngine, ranks: RecordedGroup) -> None:
    assert engine.optim_step("a", AdamParams(learning_rate=1e-3))["step"] == 1
    ranks.failure = UserError("the norm is nan")
    with pytest.raises(UserError):
        engine.optim_step("a", AdamParams(learning_rate=1e-3))
    ranks.failure = None
    metrics = engine.optim_step("a", AdamParams(learning_rate=1e-3))
    assert metrics == {"grad_norm": 1.5, "learning_rate": 1e-3, "step": 2.0}


@pytest.mark.core("Engine.close")
def test_its_ranks_end_with_it(engine: MegatronEngine, ranks: RecordedGroup) -> None:
    engine.close()
    assert ranks.calls == ["close"]
