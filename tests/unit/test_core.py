"""`make test` has a promise for each route, each verb of an engine and each durability rule."""

from __future__ import annotations

import re
from pathlib import Path

from support.selection import LANES, TESTS, lane_of, words_of_marks
from support.server.every_endpoint import document
from tinsmith_trainer.engines.base import CallRunner, Engine

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "design.md"
MAKEFILE = ROOT / "Makefile"
RULE = re.compile(r"^\| (\d+) \|", re.MULTILINE)


def routes(folder: Path) -> set[str]:
    paths = document(folder)["paths"]
    return {f"{method.upper()} {path}" for path, operations in paths.items() for method in operations}


def verbs() -> set[str]:
    names = [*vars(CallRunner), *vars(Engine)]
    return {f"Engine.{name}" for name in names if not name.startswith("_")}


def rules() -> set[str]:
    text = DESIGN.read_text(encoding="utf-8")
    durability = text[text.index("## Durability") : text.index("### Fault model")]
    return {f"durability {number}" for number in RULE.findall(durability)}


def test_every_route_verb_and_durability_rule_has_a_core_promise(tmp_path: Path) -> None:
    there, named = routes(tmp_path) | verbs() | rules(), words_of_marks("core")
    named.pop("", None)  # the mark of a whole module names nothing
    assert sorted(there - named.keys()) == [], "these have no test with `@pytest.mark.core(...)`"
    assert sorted(named.keys() - there) == [], "these are named by tests, and do not exist"


def test_a_test_that_is_slow_says_why() -> None:
    slow = words_of_marks("slow")
    assert slow
    assert slow.get("", []) == [], "these have a mark `slow` without a reason"


def test_each_module_of_tests_is_in_the_lane_of_a_make_target() -> None:
    modules = {path: lane_of(path) for path in TESTS.rglob("test_*.py")}
    assert [path for path, lane in modules.items() if lane is None] == []
    assert set(LANES.values()) == set(modules.values())
    targets = re.findall(r"^test-([\w-]+):", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(LANES.values()) - set(targets) == set()


def test_the_nearest_folder_decides_about_the_lane() -> None:
    assert lane_of(TESTS / "cluster" / "node" / "test_pools.py") == "nodes"
    assert lane_of(TESTS / "cluster" / "operator" / "test_pools.py") == "clusters"
    assert lane_of(TESTS / "support" / "selection.py") is None
