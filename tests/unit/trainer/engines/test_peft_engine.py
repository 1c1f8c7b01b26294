"""The PEFT engine beyond the contract: bounded memory, low precision, failures."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.engine.contract import (
    CROSS_ENTROPY,
    advance_all,
    bits,
    forward_backward,
    gradients,
    group,
    state_bits,
)
from support.engine.datums import policy_datum, sft_datum
from support.engine.peft import DATUMS, new_engine
from support.tiny_models import SMALL, TIED, tiny_model
from tinsmith_trainer.engines.base import AdamParams, AdapterState, LoraProducts, LoraSpec, LossSpec, Work
from tinsmith_trainer.engines.batching import PACKED_BELOW_TOKENS
from tinsmith_trainer.engines.peft import PeftEngine, PeftEngineSettings, build_peft_engine, shared_forward
from tinsmith_trainer.engines.peft import engine as engine_module
from tinsmith_trainer.engines.peft.adapter import plan_layout
from tinsmith_trainer.engines.peft.shared_forward import recomputed
from tinsmith_trainer.errors import CheckpointInvalid, ModelDirectoryInvalid, ServerError, UserError
from tinsmith_trainer.process import exit as process_exit
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.torch_model import device
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.lora import DeltasApart, OwnDelta, StackedLoraLinear, routed


def assert_close(left: PeftEngine, right: PeftEngine, tolerance: float = 1e-5) -> None:
    """Logprobs and gradients of one call."""
    left_outcome, right_outcome = (forward_backward(engine, DATUMS) for engine in (left, right))
    for one, other in zip(left_outcome.outputs, right_outcome.outputs, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=tolerance)
    expected = gradients(right)
    for name, gradient in gradients(left).items():
        np.testing.assert_allclose(gradient, expected[name], atol=tolerance * np.abs(expected[name]).max())


@pytest.mark.parametrize("model", [tiny_model(), tiny_model(shape=TIED)], ids=["untied", "tied"])
def test_logits_in_chunks_train_as_logits_at_once(model: TorchModel) -> None:
    a_few_tokens = model.info.vocab_size * 4 * 7
    assert_close(new_engine(PeftEngineSettings(logits_byte_budget=a_few_tokens), model), new_engine(model=model))


def test_layers_recomputed_in_backward_train_bit_for_bit_as_layers_kept() -> None:
    recomputing = new_engine(PeftEngineSettings(recompute_above_tokens=0))
    keeping = new_engine(PeftEngineSettings(recompute_above_tokens=PACKED_BELOW_TOKENS - 1))  # in rows, too
    assert bits(forward_backward(recomputing, DATUMS)) == bits(forward_backward(keeping, DATUMS))
    assert state_bits(recomputing.state("a")) == state_bits(keeping.state("a"))


@pytest.fixture
def portable_kernels() -> Iterator[None]:
    """Disable AMX: some virtual machines advertise it and trap on it, and oneDNN would use it for bfloat16."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.usefixtures("portable_kernels")
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # by the flag's context itself
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_low_precision_base_keeps_adapters_moments_and_losses_in_float32(dtype: torch.dtype) -> None:
    low, full = new_engine(model=tiny_model(dtype=dtype)), new_engine()

    outcome = forward_backward(low, DATUMS)

    state = low.state("a")
    assert {str(values.dtype) for values in state.tensors.values()} == {"float32"}
    reference = forward_backward(full, DATUMS)
    for one, other in zip(outcome.outputs, reference.outputs, strict=True):
        assert one["logprobs"].dtype == np.float32
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=0.25)
    assert not low.capabilities().batch_invariant


@pytest.mark.usefixtures("portable_kernels")
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # by the flag's context itself
def test_products_in_bfloat16_train_as_in_float32_within_rounding() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    low, full = new_engine(PeftEngineSettings(lora_products="bfloat16"), model), new_engine(model=model)
    low.load_state("a", full.state("a"), with_optimizer=True)
    for engine in (low, full):
        forward_backward(engine, DATUMS)

    expected = gradients(full)
    for name, gradient in gradients(low).items():
        assert gradient.dtype == np.float32
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=0.05 * np.abs(expected[name]).max())
    assert any(not np.array_equal(gradient, expected[name]) for name, gradient in gradients(low).items())


@pytest.mark.parametrize(("products", "message"), [("bfloat16", "--dtype bfloat16"), ("tf32", "requires a GPU")])
def test_products_that_the_weights_or_the_device_have_not_are_refused(products: LoraProducts, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        build_peft_engine(tiny_model(), PeftEngineSettings(lora_products=products))


def test_a_fresh_adapter_is_drawn_as_peft_draws_it_modules_by_name() -> None:
    engine = new_engine()
    engine.create_adapter("c", LoraSpec(rank=8, alpha=32.0, seed=7))
    generator = torch.Generator().manual_seed(7)

    weights = group(engine.state("c"), "weights")

    modules = sorted(name.removesuffix(".lora_A") for name in weights if name.endswith(".lora_A"))
    assert modules == sorted(tiny_model().layers)
    for module in modules:
        expected = torch.empty(8, tiny_model().layers[module].in_features)
        torch.nn.init.kaiming_uniform_(expected, a=math.sqrt(5), generator=generator)
        assert np.array_equal(weights[f"{module}.lora_A"], expected.numpy())


def test_a_layer_is_recomputed_under_the_route_it_ran_under() -> None:
    """Backward may run in another thread, where no route is set."""
    layer = StackedLoraLinear(torch.nn.Linear(4, 4).requires_grad_(False), "layer")
    leaves = (torch.ones(2, 4, requires_grad=True), torch.ones(4, 2, requires_grad=True))
    route = {"layer": DeltasApart((OwnDelta(*leaves, scale=1.0),), (3,), 3)}
    x = torch.ones(1, 3, 4)
    with routed(route):
        kept = layer(x)
        with recomputed([layer], route):
            again = layer(x)

    expected = torch.autograd.grad(kept.square().sum(), leaves)
    for gradient, same in zip(torch.autograd.grad(again.square().sum(), leaves), expected, strict=True):
        assert torch.equal(gradient, same)


def test_a_microbatch_that_runs_out_of_memory_fails_its_works_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = new_engine(PeftEngineSettings(token_budget=40))
    before = {adapter: state_bits(engine.state(adapter)) for adapter in "ab"}
    run_shares = shared_forward.run_shares

    def out_of_memory_at_length_40(model, shares, settings):
        if 40 in shares[0].shape.lengths:
            raise torch.OutOfMemoryError("tried to allocate 1 PiB")
        return run_shares(model, shares, settings)

    monkeypatch.setattr(engine_module, "run_shares", out_of_memory_at_length_40)

    failing = engine.start(Work("a", DATUMS, CROSS_ENTROPY))
    fine = engine.start(Work("b", DATUMS[:2], CROSS_ENTROPY))
    advance_all(engine, [failing, fine])

    with pytest.raises(ServerError, match="1 PiB"):
        engine.finish(failing)
    assert state_bits(engine.state("a")) == before["a"]
    engine.finish(fine)
    assert state_bits(engine.state("b")) != before["b"]


class Ended(BaseException):
    """Instead of the end of the process."""


def end(*_: object) -> None:
    raise Ended


def fault(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_lost_device_ends_the_process_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    monkeypatch.setattr(device, "end_process", end)
    monkeypatch.setattr(engine_module, "run_shares", fault)
    with pytest.raises(Ended):
        forward_backward(engine, DATUMS)
    monkeypatch.setattr(engine_module, "read_state", fault)
    with pytest.raises(Ended):
        engine.state("a")


def test_a_step_that_stops_in_the_middle_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step, moments and weights change one after the other: the adapter is neither as before nor as after."""
    engine = new_engine()
    forward_backward(engine, DATUMS)
    monkeypatch.setattr(process_exit, "end_process", end)
    monkeypatch.setattr(torch.optim.AdamW, "step", fault)
    with pytest.raises(Ended):
        engine.optim_step("a", AdamParams(learning_rate=1e-3))


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(learning_rate=float("nan")),
        AdamParams(learning_rate=-1.0),
        AdamParams(learning_rate=1e-3, beta1=1.0),
        AdamParams(learning_rate=1e-3, beta2=-0.1),
        AdamParams(learning_rate=1e-3, eps=0.0),
        AdamParams(learning_rate=1e-3, weight_decay=float("inf")),
        AdamParams(learning_rate=1e-3, grad_clip_norm=-1.0),
    ],
    ids=["nan-rate", "negative-rate", "beta1", "beta2", "eps", "decay", "clip"],
)
def test_an_impossible_hyperparameter_changes_nothing_at_all(params: AdamParams) -> None:
    engine = new_engine()
    forward_backward(engine, DATUMS)
    before = state_bits(engine.state("a"))
    with pytest.raises(UserError, match="optim_step"):
        engine.optim_step("a", params)
    assert state_bits(engine.state("a")) == before


def altered(state: AdapterState, how: str) -> AdapterState:
    tensors = dict(state.tensors)
    name = next(iter(group(state, "weights")))
    match how:
        case "missing":
            del tensors[f"weights/{name}"]
        case "extra":
            tensors["weights/model.layers.9.mlp.up_proj.lora_A"] = np.zeros((8, 64), np.float32)
        case "shape":
            tensors[f"weights/{name}"] = np.zeros((8, 3), np.float32)
        case "no-moments":
            tensors = {name: values for name, values in tensors.items() if not name.startswith("adam/")}
        case "one-moment":
            tensors = {name: values for name, values in tensors.items() if not name.startswith("adam/exp_avg_sq/")}
    return AdapterState(state.lora, state.optimizer_step, tensors)


@pytest.mark.parametrize("how", ["missing", "extra", "shape", "no-moments", "one-moment"])
def test_a_state_of_another_shape_is_refused_and_changes_nothing(how: str) -> None:
    engine = new_engine()
    before = state_bits(engine.state("b"))
    with pytest.raises(CheckpointInvalid):
        engine.load_state("b", altered(engine.state("a"), how), with_optimizer=True)
    assert state_bits(engine.state("b")) == before


def test_an_adapter_is_restored_after_the_slots_and_the_rank_were_lowered_below_its_needs() -> None:
    before = new_engine()
    after = build_peft_engine(tiny_model(), PeftEngineSettings(adapter_slots=1, max_rank=4))
    for adapter in "ab":
        after.load_state(adapter, before.state(adapter), with_optimizer=True)
        assert state_bits(after.state(adapter)) == state_bits(before.state(adapter))


def test_stable_reinforce_trains_as_cispo_and_says_so() -> None:
    engine = new_engine()
    datums = [policy_datum(9)]
    asked = forward_backward(engine, datums, loss=LossSpec("stable_reinforce"))
    stand_in = forward_backward(engine, datums, adapter="a", loss=LossSpec("cispo"))
    assert asked.metrics == stand_in.metrics | {"stable_reinforce_as_cispo:max": 1.0}
    penalised = forward_backward(engine, datums, loss=LossSpec("stable_reinforce", {"kl_coeff": 0.1}))
    assert penalised.metrics["loss:sum"] > asked.metrics["loss:sum"]


def test_a_model_that_caps_its_logits_is_refused() -> None:
    model = tiny_model("llama3", SMALL)
    handle = model.model.register_forward_hook(lambda _module, _args, out: setattr(out, "logits", out.logits.tanh()))
    try:
        with pytest.raises(ModelDirectoryInvalid, match="logits"):
            build_peft_engine(model)
    finally:
        handle.remove()


@pytest.mark.core("Engine.clock_seconds")
@pytest.mark.parametrize("recompute_above_tokens", [0, 1 << 20], ids=["recomputed", "kept"])
def test_a_sampler_has_turns_between_the_layers_of_forward_and_backward(recompute_above_tokens: int) -> None:
    """The turns change no bit, and the engine's clock stands still in them.

    A waiting sampler gets a turn before each layer, and after its gradient.
    """
    settings = PeftEngineSettings(recompute_above_tokens=recompute_above_tokens)
    engine, alone, model = new_engine(settings), new_engine(settings), tiny_model()
    undisturbed = forward_backward(alone, [sft_datum(20)])
    turns, sampled = model.shared_device.turns, 0
    finished = threading.Event()

    def sample() -> None:
        nonlocal sampled
        while not finished.is_set():
            with turns.held(Use.SAMPLING), torch.inference_mode():
                model.model(input_ids=torch.arange(5)[None])
                sampled += 1

    def wait_for_sampler(_module: torch.nn.Module, _args: object) -> None:
        while turns.user is Use.TRAINING and not turns.waiting:
            sampler.join(0.001)

    sampler = threading.Thread(target=sample)
    layers = model.decoder.layers
    handles = [layer.register_forward_pre_hook(wait_for_sampler, prepend=True) for layer in layers]
    sampler.start()
    try:
        waited_before = turns.waited_seconds[Use.TRAINING]
        started, clock_started = time.perf_counter(), engine.clock_seconds()
        disturbed = forward_backward(engine, [sft_datum(20)])
        training_seconds = engine.clock_seconds() - clock_started
        seconds = time.perf_counter() - started
        waited_seconds = turns.waited_seconds[Use.TRAINING] - waited_before
    finally:
        finished.set()
        sampler.join()
        [handle.remove() for handle in handles]

    assert sampled > len(layers)
    assert waited_seconds > 0
    assert training_seconds <= seconds - waited_seconds
    assert bits(disturbed) == bits(undisturbed)
    assert state_bits(engine.state("a")) == state_bits(alone.state("a"))


def test_every_tensor_starts_where_blas_finds_it_aligned() -> None:
    """Otherwise an adapter's bits could depend on the rank, and so on the offset, of earlier tensors."""
    layout = plan_layout(LoraSpec(rank=5, alpha=32.0, seed=1), tiny_model().layers)
    addresses = [view.data_ptr() for view in layout.views(torch.zeros(layout.size)).values()]
    assert all(address % 64 == 0 for address in addresses)
    assert all(first.end <= second.offset for first, second in itertools.pairwise(layout.slots.values()))
