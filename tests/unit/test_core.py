"""`make test` has a promise for each route, each verb of an engine and each durability rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.selection import core_subjects
from support.server.every_endpoint import document
from tinsmith_trainer.engines.base import Computer, Engine

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
RULE = re.compile(r"^\| (\d+) \|", re.MULTILINE)


def routes(folder: Path) -> set[str]:
    paths = document(folder)["paths"]
    return {f"{method.upper()} {path}" for path, operations in paths.items() for method in operations}


def verbs() -> set[str]:
    names = [*vars(Computer), *vars(Engine)]
    return {f"Engine.{name}" for name in names if not name.startswith("_")}


def rules() -> set[str]:
    text = DESIGN.read_text(encoding="utf-8")
    durability = text[text.index("## Durability") : text.index("### Fault model")]
    return {f"durability {number}" for number in RULE.findall(durability)}


def test_every_route_verb_and_durability_rule_has_a_core_promise(tmp_path: Path) -> None:
    there, named = routes(tmp_path) | verbs() | rules(), core_subjects()
    assert sorted(there - named.keys()) == [], "these have no test with `@pytest.mark.core(...)`"
    assert sorted(named.keys() - there) == [], "these are named by tests, and do not exist"


def test_a_test_that_is_slow_says_why(request: pytest.FixtureRequest) -> None:
    slow = [mark for item in request.session.items for mark in item.iter_markers("slow")]
    assert all(mark.args and isinstance(mark.args[0], str) for mark in slow)
