"""Every behaviour of the stand-in for Miles has its source written down, and Tinsmith uses nothing else of it."""

from __future__ import annotations

import ast
import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.miles.ranks import stand_in

ROOT = Path(__file__).parents[5]
PACKAGE = ROOT / "trainer_image" / "tinsmith_trainer" / "engines" / "miles"
ASSUMPTIONS = tomllib.loads((ROOT / "tests" / "support" / "miles" / "assumptions.toml").read_text())

FOREIGN = ("miles.", "megatron.bridge")


def assumed() -> dict[str, list[dict[str, Any]]]:
    return {module: entries for module, entries in ASSUMPTIONS.items() if isinstance(entries, list)}


def names() -> set[tuple[str, str]]:
    return {(module, entry["name"]) for module, entries in assumed().items() for entry in entries}


def imported() -> Iterator[tuple[str, str]]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(FOREIGN):
                yield from ((node.module, name.name) for name in node.names)
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith(FOREIGN) for name in node.names), path


def test_the_engine_imports_nothing_else_of_miles() -> None:
    assert set(imported()) == names()


def test_the_stand_in_has_every_name() -> None:
    with stand_in():
        for module, name in names():
            found = importlib.import_module(module)
            assert hasattr(found, name) or importlib.import_module(f"{module}.{name}")


def test_every_assumption_has_a_source_and_a_text() -> None:
    for entries in assumed().values():
        for entry in entries:
            assert set(entry) == {"name", "file", "function", "says"}
            assert entry["file"].endswith(".py")
            assert all(entry.values())
