"""A base model that is kept in few bits trains as plain PEFT does on those very weights, and keeps its bits."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.engine.contract import bits as bits_of
from support.engine.contract import compute_together, forward, forward_backward, group, state_bits
from support.engine.datums import sft_datum
from support.sampler.jobs import ask, job
from support.temporary_files import folder_of_whole_run
from support.tiny_models import tiny_directory
from tinsmith_trainer.engines.base import AdamParams, Datum, LoraSpec, LossSpec, Work
from tinsmith_trainer.engines.peft import PeftEngine, build_peft_engine
from tinsmith_trainer.parity.reference import PeftReference
from tinsmith_trainer.parity.sides import compute
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.torch_model.base_model import Quantization
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model
from tinsmith_trainer.torch_model.quantization import EXPERT_WEIGHTS, QuantizedLinear, QuantizedWeight, quantize
from tinsmith_trainer.torch_model.tiny_model import Family
from transformers import AutoModelForCausalLM, AutoTokenizer

LORA = LoraSpec(rank=4, alpha=32.0, seed=1)
ADAM = AdamParams(learning_rate=1e-3, eps=1e-4)
CROSS_ENTROPY = LossSpec("cross_entropy")
DATUMS = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12))]

CASES = [("qwen3", "8bit"), ("qwen3", "4bit"), ("qwen3-moe", "4bit")]
every_case = pytest.mark.parametrize(("family", "bits"), CASES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),  # of the reference's inputs
]


@functools.cache
def quantized(family: Family, bits: Quantization) -> TorchModel:
    return load_torch_model(str(tiny_directory(family)), quantization=bits)


def new_engine(family: Family, bits: Quantization) -> PeftEngine:
    engine = build_peft_engine(quantized(family, bits))
    engine.create_adapter("a", LORA)
    return engine


def step(engine: Any, compute_call: Any = forward_backward) -> None:
    compute_call(engine, DATUMS)
    engine.optim_step("a", ADAM)


@functools.cache
def dense_directory(family: Family, bits: Quantization) -> Path:
    """Write a plain model whose weights are what the codes stand for."""
    directory = folder_of_whole_run("dense-model-")
    plain, coded = (AutoModelForCausalLM.from_pretrained(tiny_directory(family), dtype=torch.float32) for _ in range(2))
    quantize(coded, bits)
    with torch.no_grad():
        for name, module in coded.named_modules():
            if isinstance(module, QuantizedLinear):
                plain.get_submodule(name).weight.copy_(module.weight)
            for weight in EXPERT_WEIGHTS if hasattr(module, "quantized_weights") else ():
                if weight in module.quantized_weights:
                    getattr(plain.get_submodule(name), weight).copy_(getattr(module, weight))
    plain.save_pretrained(directory)
    AutoTokenizer.from_pretrained(tiny_directory(family)).save_pretrained(directory)
    return directory


@every_case
def test_ten_steps_are_those_of_plain_peft_on_the_same_quantized_base(family: Family, bits: Quantization) -> None:
    engine = new_engine(family, bits)
    options = SimpleNamespace(
        model=str(dense_directory(family, bits)), model_revision=None, device="cpu", dtype="float32"
    )
    reference = PeftReference(cast("Any", options))
    reference.create_adapter("a", LORA)
    for _ in range(10):
        step(engine)
        compute(reference, Work("a", DATUMS, CROSS_ENTROPY))
        reference.optim_step("a", ADAM)
    expected = group(reference.state("a"), "weights")
    trained = group(engine.state("a"), "weights")
    assert trained.keys() == expected.keys()
    for name, values in trained.items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=1e-5, err_msg=name)


@every_case
def test_samples_have_the_logprobs_of_the_trainer(family: Family, bits: Quantization) -> None:
    engine, text = new_engine(family, bits), sft_datum(24, 7).tokens
    step(engine)
    sampler = BuiltinSampler(quantized(family, bits), BuiltinSamplerSettings())
    try:
        sampler.load_adapter("a", engine.weights("a"))
        scored = ask(sampler, job(text, adapter="a", max_tokens=1, prompt_logprobs=True)).prompt_logprobs
    finally:
        sampler.close()
    datum = Datum(text[:-1], {"target_tokens": text[1:].astype(np.int64)})
    np.testing.assert_allclose(scored[1:], forward(engine, [datum]).outputs[0]["logprobs"], atol=1e-5)


@every_case
def test_company_and_replay_change_no_bit(family: Family, bits: Quantization) -> None:
    engine = new_engine(family, bits)
    assert engine.capabilities().batch_invariant
    step(engine)
    snapshot = engine.state("a")
    engine.create_adapter("b", LoraSpec(rank=2, alpha=16.0, seed=2))
    alone = forward(engine, DATUMS)
    works = [Work(adapter, DATUMS, CROSS_ENTROPY, forward_only=True) for adapter in ("a", "b")]
    assert bits_of(compute_together(engine, works)[0]) == bits_of(alone)
    step(engine)

    replayed = build_peft_engine(load_torch_model(str(tiny_directory(family)), quantization=bits))
    replayed.load_state("a", snapshot, with_optimizer=True)
    step(replayed)
    assert state_bits(replayed.state("a")) == state_bits(engine.state("a"))


@every_case
def test_no_weight_is_dense_but_while_it_is_multiplied(family: Family, bits: Quantization) -> None:
    model = quantized(family, bits)
    held = [module for module in model.model.modules() if isinstance(module, QuantizedWeight)]
    wide = sum(module.shape.numel() * 4 for module in held)
    coded = sum(buffer.nbytes for module in held for buffer in module.buffers())
    assert coded < wide * (0.3 if bits == "8bit" else 0.2)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    engine = new_engine(family, bits)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward_backward(engine, DATUMS)
    assert saved
    weights = [each for module in held for each in (module.dense(), module.dense().mT)]
    assert not any(
        torch.equal(weight, tensor) for weight in weights for tensor in saved if tensor.shape == weight.shape
    )


def test_the_codes_are_those_of_the_formats() -> None:
    weight = torch.tensor([[0.0, 2.0, -4.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    eight = QuantizedWeight(weight, "8bit")
    assert eight.codes.tolist() == [[0, 64, -127, 32], [0, 0, 0, 0]]
    assert eight.dense()[0, 2] == -4
    four = QuantizedWeight(weight, "4bit")
    assert four.codes.tolist()[:2] == [0x7C, 0x0A]
    assert four.dense()[0, :3].tolist() == pytest.approx([0.0, 4 * 0.44070982933044434, -4.0])


def test_a_quantized_base_is_reported() -> None:
    assert quantized("qwen3", "4bit").info.quantization == "4bit"
    assert load_torch_model(str(tiny_directory())).info.quantization == ""
