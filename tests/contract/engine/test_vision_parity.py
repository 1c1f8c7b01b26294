"""Training on images, compared with the model's processor, plain transformers and plain PEFT."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.engine.contract import forward, forward_backward, group, train
from support.engine.peft import assert_alike
from support.engine.places import Place, in_place_of_a_gpu, peft_engine
from support.tiny_models import tiny_model
from support.tiny_vision import (
    ALIKE,
    IMAGE_TOKEN,
    VISION_FAMILIES,
    VisionFamily,
    encoded,
    picture,
    plain_inputs,
    split_tokens,
    vision_directory,
    vision_model,
)
from tinsmith_trainer.engines.base import AdamParams, AdapterState, Datum, LoraSpec
from tinsmith_trainer.engines.peft import PeftEngine, PeftEngineSettings, build_peft_engine
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.torch_model.loading import load_torch_model
from torch.nn.functional import log_softmax
from transformers import AutoModelForImageTextToText

LORA = LoraSpec(rank=4, alpha=32.0, seed=1)
PARAMS = AdamParams(learning_rate=1e-3, eps=1e-4, weight_decay=0.01, grad_clip_norm=1.0)
PROMPTS = [
    ("What is {} and what is {}? Both are noise.", (encoded(picture()), encoded(picture(56, 96, seed=1), "jpeg"))),
    ("{} is noise.", (encoded(picture(33, 50, seed=2)),)),
    ("No image here.", ()),
]

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@dataclass(frozen=True, slots=True)
class Example:
    """One datum, and the inputs of a plain forward for it."""

    datum: Datum
    inputs: Any
    targets: torch.Tensor


def example(family: VisionFamily, prompt: str, files: tuple[bytes, ...]) -> Example:
    inputs = plain_inputs(family, prompt, *files)
    ids = inputs["input_ids"][0].numpy()
    targets = np.roll(ids, -1)
    targets[targets == IMAGE_TOKEN] = 0
    tokens, images = split_tokens(ids, *files)
    return Example(Datum(tokens, {"target_tokens": targets}, images), inputs, torch.from_numpy(targets))


def examples(family: VisionFamily) -> list[Example]:
    return [example(family, *prompt) for prompt in PROMPTS]


def new_engine(family: VisionFamily) -> PeftEngine:
    """Return an engine, for a mixture without its experts, which PEFT trains in another form."""
    engine = build_peft_engine(vision_model(family))
    engine.create_adapter("a", replace(LORA, train_mlp=not family.endswith("moe")))
    return engine


def plain_logprobs(model: Any, one: Example) -> torch.Tensor:
    logits = model(**one.inputs).logits[0].float()
    return log_softmax(logits, -1).gather(-1, one.targets[:, None])[:, 0]


def peft_twin(family: VisionFamily, state: AdapterState) -> Any:
    """PEFT's own LoRA layers, started from the same A."""
    weights = group(state, "weights")
    modules = sorted({name.rpartition(".")[0] for name in weights})
    plain = AutoModelForImageTextToText.from_pretrained(vision_directory(family), dtype=torch.float32).eval()
    model = get_peft_model(plain, LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=modules))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in weights.items():
            parameters[f"base_model.model.{name}.default.weight"].copy_(torch.from_numpy(values))
    return model.eval()


def train_twin(model: Any, data: list[Example], steps: int) -> None:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable, PARAMS.learning_rate, (PARAMS.beta1, PARAMS.beta2), PARAMS.eps, PARAMS.weight_decay
    )
    for _ in range(steps):
        optimizer.zero_grad()
        (-sum(plain_logprobs(model, one).sum() for one in data)).backward()
        torch.nn.utils.clip_grad_norm_(trainable, PARAMS.grad_clip_norm)
        optimizer.step()


@pytest.mark.parametrize("family", [*VISION_FAMILIES, *ALIKE])
def test_training_on_images_equals_a_hand_written_loop_with_the_processor_in_every_weight(family: VisionFamily) -> None:
    data = examples(family)
    engine = new_engine(family)
    twin = peft_twin(family, engine.state("a"))

    for _ in range(5):
        forward_backward(engine, [one.datum for one in data])
        engine.optim_step("a", PARAMS)
    train_twin(twin, data, steps=5)

    expected = dict(twin.named_parameters())
    for name, values in group(engine.state("a"), "weights").items():
        expected_values = expected[f"base_model.model.{name}.default.weight"].detach().numpy()
        np.testing.assert_allclose(values, expected_values, rtol=0, atol=1e-5, err_msg=name)
    for one, output in zip(data, forward(engine, [one.datum for one in data]).outputs, strict=True):
        with torch.no_grad():
            np.testing.assert_allclose(output["logprobs"], plain_logprobs(twin, one).numpy(), atol=1e-4)


@in_place_of_a_gpu
@pytest.mark.parametrize("recompute_above_tokens", [0, 10_000], ids=["layers recomputed", "layers kept"])
@pytest.mark.parametrize("family", [*VISION_FAMILIES, *ALIKE])
def test_training_on_images_is_as_on_the_cpu(place: Place, family: VisionFamily, recompute_above_tokens: int) -> None:
    settings = PeftEngineSettings(recompute_above_tokens=recompute_above_tokens)
    there = peft_engine(place, vision_directory(family), settings)
    datums = [one.datum for one in examples(family)]
    assert_alike(there, build_peft_engine(vision_model(family)), datums)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_datum_with_images_has_the_same_bits_in_any_company(family: VisionFamily) -> None:
    engine = new_engine(family)
    datums = [one.datum for one in examples(family)]

    together = forward(engine, datums).outputs

    for datum, output in zip(datums, together, strict=True):
        alone = forward(engine, [datum]).outputs[0]
        np.testing.assert_array_equal(output["logprobs"], alone["logprobs"])


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_an_adapter_trained_on_images_loads_in_plain_peft_and_merged_in_plain_transformers(
    family: VisionFamily, tmp_path: Path
) -> None:
    [one, *_] = examples(family)
    engine = new_engine(family)
    train(engine, [one.datum], steps=2)
    (tmp_path / "peft").mkdir()
    (tmp_path / "merged").mkdir()

    engine.export(engine.state("a"), tmp_path / "peft", "peft")
    engine.export(engine.state("a"), tmp_path / "merged", "merged")

    [expected] = [output["logprobs"] for output in forward(engine, [one.datum]).outputs]
    plain = AutoModelForImageTextToText.from_pretrained(vision_directory(family), dtype=torch.float32)
    merged = load_torch_model(str(tmp_path / "merged"))
    assert merged.vision is not None
    for model in (PeftModel.from_pretrained(plain, tmp_path / "peft").eval(), merged.model):
        with torch.no_grad():
            np.testing.assert_allclose(plain_logprobs(model, one).numpy(), expected, atol=1e-4)


def test_an_image_that_is_cut_off_fails_its_call_for_the_user_and_leaves_no_gradient() -> None:
    engine = new_engine("llava")
    good, other, _ = (one.datum for one in examples("llava"))
    [image] = other.images
    cut_off = replace(other, images=(replace(image, content=image.content[:-300]),))
    with pytest.raises(UserError, match="Datum 1, image 0 cannot be decoded as png"):
        forward_backward(engine, [good, cut_off])
    assert engine.optim_step("a", PARAMS)["grad_norm"] == 0.0


def test_the_vision_tower_is_always_frozen() -> None:
    names = group(new_engine("qwen3-vl").state("a"), "weights")
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in names)


def test_only_a_model_that_sees_says_that_it_takes_images() -> None:
    assert new_engine("gemma3").capabilities().images
    assert not build_peft_engine(tiny_model()).capabilities().images
