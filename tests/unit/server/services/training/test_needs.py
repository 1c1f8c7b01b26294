"""Needs of programs, compared with what a served model can do."""

from __future__ import annotations

from typing import Any

import pytest
from tinsmith_server.services.training.needs import unmet_needs
from tinsmith_server.wire.needs import METADATA_KEY, InvalidNeeds, Needs, needs_in
from tinsmith_server.wire.responses import SupportedModel

MODEL = SupportedModel(
    model_name="tiny",
    max_context_length=4096,
    images=False,
    losses=["cross_entropy", "ppo"],
    optimizers=["adamw"],
    modules=["attn"],
    max_rank=32,
    max_sampling_rank=16,
    numerics="exact",
)
UNMET: list[tuple[dict[str, Any], str]] = [
    ({"context": 8192}, "tiny has a context of 4096 tokens, and the program needs 8192"),
    ({"images": True}, "tiny does not take images"),
    ({"audio": True}, "tiny does not take audio"),
    ({"loss": ["ppo", "dro"]}, "tiny does not have the loss 'dro'; it has cross_entropy, ppo"),
    ({"loss": "custom"}, "tiny does not have the loss 'custom'; it has cross_entropy, ppo"),
    ({"optimizer": "dimuon"}, "tiny does not have the optimizer 'dimuon'; it has adamw"),
    ({"rank": 64}, "tiny is trained up to LoRA rank 32, and the program needs 64"),
    ({"rank": 32, "sampling": True}, "tiny is sampled up to LoRA rank 16, and the program needs 32"),
    ({"modules": ["attn", "mlp"]}, "tiny cannot train mlp; LoRA trains attn"),
    ({"numerics": "fast"}, "tiny has exact numerics, and the program needs fast"),
    ({"quantization": "int8"}, "tiny has weights in full precision, not in int8"),
]


@pytest.mark.parametrize(("needs", "sentence"), UNMET)
def test_an_unmet_need_is_one_sentence(needs: dict[str, Any], sentence: str) -> None:
    assert list(unmet_needs(Needs.model_validate(needs), MODEL)) == [sentence]


def test_each_need_has_such_a_sentence() -> None:
    assert {name for needs, _ in UNMET for name in needs} == set(Needs.model_fields) - {"model"}


@pytest.mark.parametrize(
    "model", [MODEL, SupportedModel(model_name="unknown", optimizers=["adamw"])], ids=["known", "unknown"]
)
def test_met_and_unknown_needs_give_none(model: SupportedModel) -> None:
    needs = Needs(loss="ppo", optimizer="adamw", rank=16, context=4096, sampling=True, numerics="exact")
    assert list(unmet_needs(needs, model)) == []


def test_a_model_for_one_purpose_does_not_meet_needs_of_the_other() -> None:
    sampled = SupportedModel(model_name="s", trainable=False)
    trained = SupportedModel(model_name="t", sampleable=False)
    assert list(unmet_needs(Needs(loss="ppo"), sampled)) == ["s is served for sampling only"]
    assert "t is served for training only" in next(iter(unmet_needs(Needs(sampling=True), trained)))


@pytest.mark.parametrize("text", ["{", "[]", '{"contxt": 1}', '{"rank": 0}'])
def test_needs_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InvalidNeeds, match="user_metadata"):
        needs_in({METADATA_KEY: text})
