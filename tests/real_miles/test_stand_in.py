"""The names and parameters that Tinsmith and the stand-in expect of Miles, checked against Miles."""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from functools import reduce
from inspect import Parameter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.miles, pytest.mark.timeout(600)]

SUPPORT = Path(__file__).parents[1] / "support" / "miles"
ASSUMPTIONS = tomllib.loads((SUPPORT / "assumptions.toml").read_text())
ASSUMED = [(module, entry["name"]) for module, found in ASSUMPTIONS.items() if module.count(".") for entry in found]
CALLED = [
    ("miles.utils.arguments", "parse_args"),
    ("miles.backends.megatron_utils.actor", "MegatronTrainRayActor.__init__"),
    ("miles.backends.megatron_utils.actor", "MegatronTrainRayActor.init"),
    ("miles.backends.megatron_utils.lora_utils", "create_lora_instance"),
    ("miles.utils.ft_utils.indep_dp", "IndepDPInfo.create_trivial"),
    ("megatron.bridge", "AutoBridge.from_hf_pretrained"),
    ("megatron.bridge", "AutoBridge.to_megatron_provider"),
    ("megatron.bridge.peft.canonical_lora", "CanonicalLoRA.transform"),
    ("megatron.bridge.peft.canonical_lora", "CanonicalLoRA.set_params_to_save"),
]


@pytest.mark.parametrize(("module", "name"), ASSUMED)
def test_miles_behaves_as_assumed(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("module", "name"), CALLED)
def test_the_stand_in_is_called_as_miles_is(module: str, name: str) -> None:
    """Its parameters are those of Miles', which asks for no other."""
    miles, stand_in = of_miles(module, name), of_stand_in(module, name)
    assert stand_in <= {parameter.name for parameter in miles}
    asked_for = {
        parameter.name for parameter in miles if parameter.default is Parameter.empty and _has_a_name(parameter)
    }
    assert asked_for <= stand_in


def of_miles(module: str, name: str) -> list[Parameter]:
    found = reduce(getattr, name.split("."), importlib.import_module(module))
    return [parameter for parameter in inspect.signature(found).parameters.values() if parameter.name != "self"]


def of_stand_in(module: str, name: str) -> set[str]:
    """Read from its text: in this process the module is Miles'."""
    path = SUPPORT / "stand_in" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    place: ast.AST = ast.parse(file.read_text())
    for part in name.split("."):
        place = next(node for node in ast.iter_child_nodes(place) if getattr(node, "name", None) == part)
    assert isinstance(place, ast.FunctionDef)
    given = place.args
    return {arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}


def _has_a_name(parameter: Parameter) -> bool:
    return parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
