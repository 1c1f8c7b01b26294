"""The names by which clients ask for a base model, with and without a context length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from tinsmith_server.fleet.base import Fleet, ServedModel
from tinsmith_server.fleet.names import NotServed, find_model, is_model_name, served_model


def fleet_of(*models: ServedModel) -> Fleet:
    by_name = {model.name: model for model in models}
    return cast(Fleet, SimpleNamespace(model=by_name.get, models=models))


@pytest.mark.parametrize(
    ("name", "is_name"),
    [
        ("Qwen/Qwen3-8B", True),
        ("Qwen/Qwen3-8B:peft:262144", True),
        ("Qwen/Qwen3-8B:peft:", False),
        ("Qwen/Qwen3-8B:peft:0", False),
        ("Qwen/Qwen3-8B:int4", False),
        ("a;b", False),
        ("a b", False),
        ("", False),
    ],
)
def test_a_name_has_a_colon_only_in_a_context_length(name: str, is_name: bool) -> None:
    assert is_model_name(name) == is_name


def test_a_long_context_is_served_by_a_model_with_that_context() -> None:
    long = ServedModel("org/long", "w", max_context_length=262_144)
    own = ServedModel("org/own:peft:64", "w", max_context_length=64)
    unknown = ServedModel("org/unknown", "w")
    fleet = fleet_of(long, own, unknown, ServedModel("org/short", "w", max_context_length=4096))
    assert find_model(fleet, "org/long:peft:262144") == find_model(fleet, "org/long") == long
    assert find_model(fleet, "org/own:peft:64") == own
    assert find_model(fleet, "org/own") is None
    assert find_model(fleet, "org/unknown:peft:131072") == unknown
    with pytest.raises(
        NotServed, match="org/short is served with a context of 4096 tokens, and org/short:peft:262144 asks"
    ):
        served_model(fleet, "org/short:peft:262144")
    with pytest.raises(NotServed, match="does not serve the base model 'org/none:peft:8'; it serves org/long"):
        served_model(fleet, "org/none:peft:8")
