"""Calls of several adapters in one forward: whose bits are their own, and whose failures."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.engine.contract import (
    CROSS_ENTROPY,
    bits,
    compute_together,
    forward,
    forward_backward,
    gradients,
    train,
)
from support.engine.datums import sft_datum
from support.engine.peft import DATUMS, new_engine
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import LoraSpec, Work
from tinsmith_trainer.engines.peft import PeftEngineSettings, shared_forward
from tinsmith_trainer.engines.peft import engine as engine_module
from tinsmith_trainer.torch_model.rows import keeps_rows_apart
from tinsmith_trainer.torch_model.tiny_model import TinyShape
from transformers import Lfm2Config, Lfm2ForCausalLM


def test_small_microbatches_of_several_adapters_share_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = []
    run_shares = shared_forward.run_shares

    def counted(model, shares, settings):
        stacks.append(len(shares))
        return run_shares(model, shares, settings)

    monkeypatch.setattr(engine_module, "run_shares", counted)
    engine = new_engine(PeftEngineSettings(cobatch_tokens=2 * 16))
    stacks.clear()

    compute_together(engine, [Work(adapter, DATUMS[:1], CROSS_ENTROPY) for adapter in "ab"])
    compute_together(engine, [Work(adapter, DATUMS[3:], CROSS_ENTROPY) for adapter in "ab"])

    assert stacks == [2, 1, 1]


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_wide_models_adapters_have_the_same_bits_in_a_stack() -> None:
    """BLAS sums 1024 products in another order for 256 rows than for 128: measured with MKL on AVX-512."""
    wide = TinyShape(hidden_size=1024, intermediate_size=64, layers=1, heads=8, kv_heads=2, max_sequence_length=512)
    engine = new_engine(PeftEngineSettings(cobatch_tokens=2**20), tiny_model(shape=wide))
    alone = forward_backward(engine, DATUMS[:1])
    alone_gradients = gradients(engine)
    engine.clear_gradients("a")

    _, stacked = compute_together(engine, [Work(adapter, DATUMS[:1], CROSS_ENTROPY) for adapter in "ba"])

    assert bits(stacked) == bits(alone)
    assert all(np.array_equal(values, alone_gradients[name]) for name, values in gradients(engine).items())


MANY_ROWS = TinyShape(hidden_size=64, intermediate_size=704, layers=2, heads=4, kv_heads=2, max_sequence_length=512)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("length", [40, 100, 250])
def test_activations_of_many_rows_have_the_same_bits_in_a_stack(length: int) -> None:
    """PyTorch cuts the elements of all rows into parts for its threads, and takes other code at a part's end."""
    engine = new_engine(PeftEngineSettings(cobatch_tokens=2**20), tiny_model(shape=MANY_ROWS))
    counts = {"a": 1, "b": 3}
    works = [
        Work(who, [sft_datum(length, seed) for seed in range(count)], CROSS_ENTROPY) for who, count in counts.items()
    ]
    alone = [bits(forward_backward(engine, work.datums, adapter=work.adapter_id)) for work in works]
    expected = {adapter: gradients(engine, adapter) for adapter in "ab"}
    for adapter in "ab":
        engine.clear_gradients(adapter)

    assert [bits(outcome) for outcome in compute_together(engine, works)] == alone
    for adapter, gradient in expected.items():
        assert all(np.array_equal(values, gradient[name]) for name, values in gradients(engine, adapter).items())


def test_a_model_with_a_convolution_over_time_shares_no_forward() -> None:
    config = Lfm2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv"],
    )
    assert not keeps_rows_apart(Lfm2ForCausalLM(config).get_decoder())


def test_a_mixture_shares_forwards() -> None:
    assert keeps_rows_apart(tiny_model("qwen3-moe").model.get_decoder())


def test_an_internal_error_in_a_shared_forward_leaves_no_part_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    works = [Work(adapter, DATUMS[:1], CROSS_ENTROPY) for adapter in "ab"]
    undisturbed = [bits(outcome) for outcome in compute_together(engine, works)]
    expected = [gradients(engine, adapter) for adapter in "ab"]
    for adapter in "ab":
        engine.clear_gradients(adapter)
    to_numpy, asked = shared_forward._to_numpy, []

    def mistaken_once(*computed):
        asked.append(computed)
        if len(asked) == 2:
            raise ValueError("a mistake of ours, behind the backward")
        return to_numpy(*computed)

    monkeypatch.setattr(shared_forward, "_to_numpy", mistaken_once)

    assert [bits(outcome) for outcome in compute_together(engine, works)] == undisturbed
    for adapter, gradient in zip("ab", expected, strict=True):
        assert all(np.array_equal(values, gradient[name]) for name, values in gradients(engine, adapter).items())


def test_another_number_of_threads_agrees_closely_if_not_by_bits() -> None:
    threads = torch.get_num_threads()
    engines = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            engines.append(new_engine())
            forward_backward(engines[-1], DATUMS)
    finally:
        torch.set_num_threads(threads)
    one, two = (gradients(engine) for engine in engines)
    for name, gradient in one.items():
        np.testing.assert_allclose(gradient, two[name], rtol=0, atol=1e-5 * np.abs(gradient).max(), err_msg=name)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("length", [1, 16, 30, 48, 64, 90, 128, 200, 400])
def test_a_datums_bits_do_not_depend_on_its_row_or_company(length: int) -> None:
    engine = new_engine(PeftEngineSettings(cobatch_tokens=2**20))
    datums = [sft_datum(length, seed) for seed in range(9)]
    whole = forward_backward(engine, datums)
    alone_gradients = gradients(engine)
    engine.clear_gradients("a")

    _, stacked = compute_together(engine, [Work("b", datums[::-1], CROSS_ENTROPY), Work("a", datums, CROSS_ENTROPY)])

    assert bits(stacked) == bits(whole)
    assert all(np.array_equal(values, alone_gradients[name]) for name, values in gradients(engine).items())
    for index in (0, 3, 8):
        assert bits(forward(engine, [datums[index]])) == repr([whole.outputs[index]["logprobs"].tolist()])


MANY_IDS = TinyShape(
    hidden_size=128, intermediate_size=704, layers=2, heads=4, kv_heads=2, vocab_size=3001, max_sequence_length=600
)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("cobatch_tokens", [2**10, 2**20])
def test_datums_of_any_length_have_the_same_bits_in_any_company(cobatch_tokens: int) -> None:
    engine = new_engine(PeftEngineSettings(cobatch_tokens=cobatch_tokens), tiny_model(shape=MANY_IDS))
    engine.create_adapter("c", LoraSpec(rank=3, alpha=8.0, seed=9, train_attn=False))
    lengths = {"a": (1, 17, 64, 127, 33), "b": (128, 130, 511, 3), "c": (520, 5, 200, 99)}
    works = [
        Work(who, [sft_datum(length, seed) for seed, length in enumerate(own)], CROSS_ENTROPY)
        for who, own in lengths.items()
    ]
    alone = [bits(forward_backward(engine, work.datums, adapter=work.adapter_id)) for work in works]
    expected = {adapter: gradients(engine, adapter) for adapter in lengths}
    for adapter in lengths:
        engine.clear_gradients(adapter)

    assert [bits(outcome) for outcome in compute_together(engine, works[::-1])][::-1] == alone
    for adapter, gradient in expected.items():
        assert all(np.array_equal(values, gradient[name]) for name, values in gradients(engine, adapter).items())
    for work, outcome in zip(works, alone, strict=True):
        one_by_one = [forward(engine, [datum], adapter=work.adapter_id).outputs[0] for datum in work.datums]
        assert repr([output["logprobs"].tolist() for output in one_by_one]) in outcome


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "other",
    [
        LoraSpec(rank=3, alpha=8.0, seed=9),
        LoraSpec(rank=32, alpha=32.0, seed=9, train_attn=False),
        LoraSpec(rank=8, alpha=32.0, seed=9, train_mlp=False, train_unembed=False),
    ],
    ids=["another rank", "no attention", "attention alone"],
)
def test_a_datums_bits_do_not_depend_on_the_rank_or_the_modules_of_its_company(other: LoraSpec) -> None:
    engine = new_engine(PeftEngineSettings(cobatch_tokens=2**20))
    engine.create_adapter("c", other)
    train(engine, DATUMS, adapter="c")
    works = [Work("a", DATUMS, CROSS_ENTROPY), Work("c", DATUMS[::-1], CROSS_ENTROPY)]
    alone = [bits(forward_backward(engine, work.datums, adapter=work.adapter_id)) for work in works]
    expected = {adapter: gradients(engine, adapter) for adapter in "ac"}
    for adapter in "ac":
        engine.clear_gradients(adapter)

    assert [bits(outcome) for outcome in compute_together(engine, works)] == alone
    for adapter, gradient in expected.items():
        assert all(np.array_equal(values, gradient[name]) for name, values in gradients(engine, adapter).items())


def test_after_a_failure_in_company_each_has_another_try_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(PeftEngineSettings(cobatch_tokens=2**20))
    works = [Work(adapter, DATUMS, CROSS_ENTROPY) for adapter in "ab"]
    undisturbed = [bits(outcome) for outcome in compute_together(engine, works)]
    expected = [gradients(engine, adapter) for adapter in "ab"]
    for adapter in "ab":
        engine.clear_gradients(adapter)
    run_shares = shared_forward.run_shares

    def too_much_for_two(model, shares, settings):
        results = run_shares(model, shares, settings)
        if len(shares) > 1:
            raise torch.OutOfMemoryError("behind the backward")
        return results

    monkeypatch.setattr(engine_module, "run_shares", too_much_for_two)

    assert [bits(outcome) for outcome in compute_together(engine, works)] == undisturbed
    for adapter, gradient in zip("ab", expected, strict=True):
        assert all(np.array_equal(values, gradient[name]) for name, values in gradients(engine, adapter).items())
