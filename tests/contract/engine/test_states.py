"""An adapter's state is all of it, bit for bit; slots come and go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.engine.contract import (
    MAX_RANK,
    SLOTS,
    EngineFactory,
    forward_backward,
    gradients,
    group,
    spec,
    state_bits,
    train,
)
from support.engine.datums import sft_datum
from tinsmith_trainer.engines.base import AdamParams, AdapterState, AnnouncedAdapter, Engine
from tinsmith_trainer.errors import TrainerError, UserError

pytestmark = pytest.mark.core

DATUMS = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12))]


@pytest.mark.core("Engine.load_state")
def test_a_run_continued_from_a_state_equals_the_undisturbed_one(engine_factory: EngineFactory, engine: Engine) -> None:
    train(engine, DATUMS, steps=2)
    forward_backward(engine, DATUMS[:1])
    elsewhere = engine_factory()
    elsewhere.load_state("a", engine.state("a"), with_optimizer=True)

    for each in (engine, elsewhere):
        train(each, DATUMS, steps=2)

    assert state_bits(elsewhere.state("a")) == state_bits(engine.state("a"))


def test_a_dropped_adapter_is_restored_exactly_in_the_middle_of_a_window(
    engine_factory: EngineFactory, engine: Engine
) -> None:
    undisturbed = engine_factory()
    undisturbed.create_adapter("a", spec(undisturbed))
    for each in (engine, undisturbed):
        train(each, DATUMS, steps=2)
        forward_backward(each, DATUMS[:1])
    state = engine.state("a")
    engine.drop("a")
    engine.create_adapter("b", spec(engine, seed=2))
    train(engine, DATUMS, adapter="b")
    engine.load_state("a", state, with_optimizer=True)

    for each in (engine, undisturbed):
        forward_backward(each, DATUMS[1:])
        each.optim_step("a", AdamParams(learning_rate=1e-2))
        train(each, DATUMS)

    assert state_bits(engine.state("a")) == state_bits(undisturbed.state("a"))


@pytest.mark.core("Engine.state")
def test_a_state_is_a_copy(engine: Engine) -> None:
    state = engine.state("a")
    before = state_bits(state)
    train(engine, DATUMS, steps=2)
    assert state_bits(state) == before


def test_an_adapter_does_not_share_memory_with_the_state_it_was_loaded_from(engine: Engine) -> None:
    train(engine, DATUMS)
    state = engine.state("a")
    engine.load_state("b", state, with_optimizer=True)
    before = state_bits(state)
    train(engine, DATUMS, adapter="b")
    assert state_bits(state) == before


def test_without_the_optimizer_moments_step_and_gradients_restart(engine: Engine) -> None:
    train(engine, DATUMS, steps=2)
    forward_backward(engine, DATUMS)

    engine.load_state("b", engine.state("a"), with_optimizer=False)

    assert engine.state("b").optimizer_step == 0
    assert not any(gradient.any() for gradient in gradients(engine, "b").values())
    assert not any(moment.any() for moment in group(engine.state("b"), "adam").values())
    original, loaded = (group(engine.state(adapter), "weights") for adapter in ("a", "b"))
    assert all(np.array_equal(original[name], values) for name, values in loaded.items())


@pytest.mark.core("Engine.create_adapter")
def test_a_new_adapter_is_the_seeds_and_changes_nothing_yet(engine: Engine) -> None:
    engine.create_adapter("same", spec(engine, seed=1))
    engine.create_adapter("other", spec(engine, seed=2))
    weights = {adapter: group(engine.state(adapter), "weights") for adapter in ("a", "same", "other")}

    for name, values in weights["a"].items():
        assert np.array_equal(values, weights["same"][name])
        if name.endswith("lora_A"):
            assert not np.array_equal(values, weights["other"][name])
        else:
            assert not values.any()
    outputs = {repr(forward_backward(engine, DATUMS, adapter=adapter).outputs) for adapter in weights}
    assert len(outputs) == 1


def test_tensor_names_and_shapes_are_those_of_the_contract(engine: Engine) -> None:
    forward_backward(engine, DATUMS)
    state = engine.state("a")

    for name, values in group(state, "weights").items():
        module, part = name.rsplit(".", 1)
        assert module
        assert values.shape[-2 if part == "lora_A" else -1] == state.lora.rank
    assert all(values.dtype == np.float32 for values in state.tensors.values())
    assert set(group(state, "gradients")) == set(group(state, "weights"))


@pytest.mark.parametrize("rank", [0, MAX_RANK + 1], ids=["zero", "above-the-limit"])
def test_a_rank_outside_the_limits_is_the_users_error(engine: Engine, rank: int) -> None:
    with pytest.raises(UserError, match=str(rank)):
        engine.create_adapter("b", spec(engine, rank=rank))


@pytest.mark.core("Engine.drop")
def test_a_full_engine_refuses_and_a_dropped_adapter_frees_its_slot(engine: Engine) -> None:
    for number in range(1, SLOTS):
        engine.create_adapter(f"more-{number}", spec(engine))
    with pytest.raises(TrainerError, match="slots"):
        engine.create_adapter("too-many", spec(engine))

    engine.drop("more-1")
    engine.drop("never-there")
    engine.create_adapter("fits", spec(engine))

    assert engine.state("fits").lora == spec(engine)


def test_an_adapter_that_has_lived_here_comes_back_when_every_slot_is_taken(engine: Engine) -> None:
    train(engine, DATUMS)
    state = engine.state("a")
    for number in range(1, SLOTS):
        engine.create_adapter(f"more-{number}", spec(engine))

    engine.load_state("b", state, with_optimizer=True)

    assert state_bits(engine.state("b")) == state_bits(state)


@pytest.mark.core("Engine.export")
def test_the_peft_export_holds_the_weights(engine: Engine, tmp_path: Path) -> None:
    train(engine, DATUMS)
    state: AdapterState = engine.state("a")

    engine.export(state, tmp_path, "peft")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.core("Engine.read_adapter", "Engine.embedding_shapes")
def test_an_exported_adapter_is_read_back_with_the_same_weights(engine: Engine, tmp_path: Path) -> None:
    train(engine, DATUMS)
    state = engine.weights("a")
    engine.export(state, tmp_path, "peft")
    lora = state.lora
    announced = AnnouncedAdapter(lora.rank, lora.seed, lora.train_attn, lora.train_mlp, lora.train_unembed)

    config, weights = ((tmp_path / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors"))
    assert {len(shape) for shape in engine.embedding_shapes()} <= {2}
    read = engine.read_adapter(config, weights, announced)

    assert state_bits(read) == state_bits(state.weights_only())


@pytest.mark.core("Engine.weights")
def test_weights_are_those_of_the_state_without_moments_and_gradients(engine: Engine) -> None:
    train(engine, DATUMS)
    forward_backward(engine, DATUMS[:1])

    weights, state = engine.weights("a"), engine.state("a")

    assert (weights.lora, weights.optimizer_step) == (state.lora, state.optimizer_step)
    assert state_bits(weights.weights_only()) == state_bits(state.weights_only())
    assert not group(weights, "adam")
    assert not group(weights, "gradients")


@pytest.mark.core("Engine.adapter_shapes")
def test_shapes_are_known_before_there_is_an_adapter_and_are_those_of_its_state(engine: Engine) -> None:
    for rank in (1, MAX_RANK):
        shapes = dict(engine.adapter_shapes(spec(engine, rank=rank)))
        engine.create_adapter("b", spec(engine, rank=rank))
        assert shapes == {name: values.shape for name, values in group(engine.state("b"), "weights").items()}
        engine.drop("b")


@pytest.mark.core("Engine.base_model")
def test_engines_on_the_same_weights_name_the_same_base_model(engine_factory: EngineFactory, engine: Engine) -> None:
    info = engine.base_model()
    assert info == engine_factory().base_model()
    assert info.revision
    assert max(int(datum.tokens.max()) for datum in DATUMS) < info.vocab_size
    assert max(datum.length for datum in DATUMS) <= info.max_sequence_length
