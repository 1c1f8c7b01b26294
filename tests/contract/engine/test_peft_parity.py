"""The torch engine compared with the libraries it stands for: plain transformers, plain PEFT, torch's AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.engine.contract import forward, forward_backward, group, train
from support.engine.datums import sft_datum
from support.tiny_models import SMALL, TIED, tiny_directory, tiny_model
from tinsmith_trainer.engines.base import AdamParams, AdapterState, Datum, LoraSpec
from tinsmith_trainer.engines.peft import PeftEngine, build_peft_engine
from tinsmith_trainer.torch_model.tiny_model import Family, TinyShape
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

LORA = LoraSpec(rank=8, alpha=32.0, seed=1)
DATUMS = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12, 40))]
TINY_MODELS = [
    pytest.param("qwen3", SMALL, id="qwen3"),
    pytest.param("llama3", SMALL, id="llama3"),
    pytest.param("qwen3", TIED, id="qwen3-tied"),
]

# PEFT asks transformers under a name that transformers 5.23 renames, and warns that merging an
# adapter of tied embeddings needs care, which the merged export takes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings:UserWarning"),
]


def new_engine(family: Family, shape: TinyShape, lora: LoraSpec = LORA) -> PeftEngine:
    engine = build_peft_engine(tiny_model(family, shape))
    engine.create_adapter("a", lora)
    return engine


def plain_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def plain_logprobs(model: Any, datum: Datum) -> torch.Tensor:
    """`[T]`, one sequence by itself."""
    tokens = torch.tensor(datum.tokens, dtype=torch.int64)[None]
    targets = torch.tensor(datum.loss_inputs["target_tokens"])[:, None]
    return log_softmax(model(input_ids=tokens).logits[0].float(), -1).gather(-1, targets)[:, 0]


@torch.no_grad()
def assert_same_logprobs(model: Any, engine: PeftEngine, tolerance: float = 1e-4) -> None:
    for datum, output in zip(DATUMS, forward(engine, DATUMS).outputs, strict=True):
        np.testing.assert_allclose(output["logprobs"], plain_logprobs(model, datum).numpy(), atol=tolerance)


def peft_twin(directory: Path, state: AdapterState) -> Any:
    """PEFT's own LoRA layers, started from the same A."""
    weights = group(state, "weights")
    modules = sorted({name.rpartition(".")[0] for name in weights})
    config = LoraConfig(r=state.lora.rank, lora_alpha=state.lora.alpha, lora_dropout=0.0, target_modules=modules)
    model = get_peft_model(plain_model(directory), config)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in weights.items():
            parameters[f"base_model.model.{name}.default.weight"].copy_(torch.from_numpy(values))
    return model


def twin_weights(model: Any) -> dict[str, np.ndarray]:
    return {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter.detach().numpy()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def train_twin(model: Any, datums: Sequence[Datum], params: AdamParams, steps: int) -> None:
    """Train by the loop that a researcher would write by hand."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable,
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -sum(plain_logprobs(model, datum).sum() for datum in datums)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, params.grad_clip_norm)
        optimizer.step()


@pytest.mark.parametrize(("family", "shape"), TINY_MODELS)
def test_a_fresh_adapter_has_the_logprobs_of_the_plain_model(family: Family, shape: TinyShape) -> None:
    assert_same_logprobs(plain_model(tiny_directory(family, shape)), new_engine(family, shape))


@pytest.mark.parametrize(("family", "shape"), TINY_MODELS)
def test_twenty_steps_equal_a_hand_written_peft_loop_in_every_weight(family: Family, shape: TinyShape) -> None:
    params = AdamParams(learning_rate=1e-3, eps=1e-4, weight_decay=0.01, grad_clip_norm=1.0)
    engine = new_engine(family, shape)
    twin = peft_twin(tiny_directory(family, shape), engine.state("a"))

    for _ in range(20):
        forward_backward(engine, DATUMS)
        engine.optim_step("a", params)
    train_twin(twin, DATUMS, params, steps=20)

    trained = group(engine.state("a"), "weights")
    expected = twin_weights(twin)
    assert set(trained) == set(expected)
    for name, values in trained.items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("family", "shape"), TINY_MODELS)
def test_the_exported_adapter_loads_in_plain_peft_with_the_same_logprobs(
    family: Family, shape: TinyShape, tmp_path: Path
) -> None:
    engine = new_engine(family, shape)
    train(engine, DATUMS, steps=3)

    engine.export(engine.state("a"), tmp_path, "peft")

    plain = plain_model(tiny_directory(family, shape))
    assert_same_logprobs(PeftModel.from_pretrained(plain, tmp_path).eval(), engine)


@pytest.mark.parametrize(("family", "shape"), TINY_MODELS)
def test_the_merged_model_loads_in_plain_transformers_with_the_same_logprobs(
    family: Family, shape: TinyShape, tmp_path: Path
) -> None:
    engine = new_engine(family, shape)
    train(engine, DATUMS, steps=3)

    engine.export(engine.state("a"), tmp_path, "merged")

    assert_same_logprobs(plain_model(tmp_path), engine)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == len(tiny_model(family, shape).tokenizer)


def test_training_the_unembedding_of_a_tied_model_leaves_its_embedding_alone(tmp_path: Path) -> None:
    engine = new_engine("qwen3", TIED)
    train(engine, DATUMS, steps=3)

    engine.export(engine.state("a"), tmp_path, "merged")

    merged, base = plain_model(tmp_path), plain_model(tiny_directory("qwen3", TIED))
    assert merged.config.tie_word_embeddings is False
    assert torch.equal(merged.model.embed_tokens.weight, base.model.embed_tokens.weight)
    assert not torch.equal(merged.lm_head.weight, base.lm_head.weight)


def test_a_merged_tied_model_stays_tied_when_the_unembedding_was_not_trained(tmp_path: Path) -> None:
    engine = new_engine("qwen3", TIED, LoraSpec(rank=8, alpha=32.0, seed=1, train_unembed=False))
    train(engine, DATUMS, steps=3)

    engine.export(engine.state("a"), tmp_path, "merged")

    merged = plain_model(tmp_path)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert_same_logprobs(merged, engine)


def test_exporting_changes_nothing_in_the_engine(tmp_path: Path) -> None:
    engine = new_engine("qwen3", TIED)
    train(engine, DATUMS)
    before = repr(forward(engine, DATUMS).outputs)
    engine.export(engine.state("a"), tmp_path, "merged")
    assert repr(forward(engine, DATUMS).outputs) == before


@pytest.mark.parametrize(
    ("lora", "modules"),
    [
        pytest.param(LoraSpec(8, 32.0, 1, train_mlp=False, train_unembed=False), "qkvo", id="attn"),
        pytest.param(LoraSpec(8, 32.0, 1, train_attn=False, train_unembed=False), "gud", id="mlp"),
        pytest.param(LoraSpec(8, 32.0, 1, train_attn=False, train_mlp=False), "l", id="unembed"),
    ],
)
def test_a_module_family_trains_its_own_layers_only(lora: LoraSpec, modules: str) -> None:
    engine = new_engine("qwen3", SMALL, lora)
    train(engine, DATUMS)
    names = {name.rsplit(".", 2)[-2] for name in group(engine.state("a"), "weights")}
    assert {name[0] for name in names} == set(modules)
