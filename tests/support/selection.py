"""Decide which tests `make test` runs: the unit tests and the core promises that need nothing but Python.

The marks decide. `core` names what a test covers (a route, a verb of the engine, a durability rule), and
tests/unit/test_core.py fails when something has no such test. `slow` takes a test out, and states why.
"""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
UNIT_FOLDER = TESTS / "unit"
QUICK = "quick"
PROCESSOR_SECONDS = 5.0
"""The processor time of a unit test, its child processes included."""

# What is asked for by a target of its own, and why.
NOT_ASKED_FOR = {
    "gpu": "They need a GPU, and were not asked for: `make test-gpu` runs them.",
    "vllm": "They ask vLLM itself, and were not asked for: `make test-vllm` runs them.",
    "nemo_rl": "They ask NeMo RL itself, and were not asked for: `make test-nemo-rl` runs them.",
    "miles": "They ask Miles itself, and were not asked for: `make test-miles` runs them.",
    "tinker_cloud": "They are programs of tinker-cloud, and were not asked for: `make test-tinker-cloud` runs them.",
    "rllm": "They are programs of rLLM, and were not asked for: `make test-rllm` runs them.",
    "skyrl_agent": "They are programs of SkyRL-agent, and were not asked for: `make test-skyrl-agent` runs them.",
    "keda": "They need KEDA, whose build takes minutes, and were not asked for: `make test-keda` runs them.",
    "recipes": "They are programs that take minutes, and were not asked for: `make recipes` runs them.",
}
PYTORCH = "pytorch"
LEFT_OUT = NOT_ASKED_FOR | {PYTORCH: "They need PyTorch, which is not installed here: `make venv` installs it."}
# The make target that runs a folder's tests, less its `test-`. What a folder says holds for the folders in it, unless
# they say otherwise. `pytest --lane NAME` runs what one of them holds.
LANES = {
    "attacks": "contracts",
    "charts": "clusters",
    "cluster": "clusters",
    "cluster/bare": "nodes",
    "cluster/node": "nodes",
    "contract": "contracts",
    # Some of its tests need a Kubernetes' API, as some of the faults do.
    "contract/fleet": "faults",
    "faults": "faults",
    "gpu": "gpu",
    "real_miles": "miles",
    "real_nemo_rl": "nemo-rl",
    "real_rllm": "rllm",
    "real_skyrl_agent": "skyrl-agent",
    "real_tinker_cloud": "tinker-cloud",
    "recipes": "recipes",
    "sdk": "programs",
    "tutorials": "programs",
    "unit": "unit",
}
_TEST = re.compile(r"^\s*(?:async )?def test_", re.MULTILINE)
_CORE = re.compile(r"\bmark\.core\b")
_PYTORCH = re.compile(r"\bmark\.pytorch\b")


def lane_of(path: Path) -> str | None:
    """Return the lane of a folder or module below tests/, which the nearest folder of LANES decides."""
    for folder in (path, *path.parents):
        if folder.is_relative_to(TESTS) and (lane := LANES.get(folder.relative_to(TESTS).as_posix())):
            return lane
    return None


def folders_of(lane: str) -> list[Path]:
    return [TESTS / folder for folder, of in LANES.items() if of == lane]


def commands(folder: str) -> str:
    """Return the commands that run the tests of a folder directly below tests/."""
    lanes = {lane for each, lane in LANES.items() if each.split("/")[0] == folder}
    return " and ".join(f"make test-{lane}" for lane in sorted(lanes))


def is_unit(item: pytest.Item) -> bool:
    return item.path.is_relative_to(UNIT_FOLDER)


def is_quick(item: pytest.Item) -> bool:
    if any(item.get_closest_marker(mark) for mark in ("slow", *NOT_ASKED_FOR)):
        return False
    return is_unit(item) or item.get_closest_marker("core") is not None


def holds_no_quick_test(path: Path) -> bool:
    """Tell whether a module can be left unread: importing all of them takes longer than running some."""
    if not path.name.startswith("test_") or path.suffix != ".py" or path.is_relative_to(UNIT_FOLDER):
        return False
    return _CORE.search(path.read_text(encoding="utf-8")) is None


def lacks_pytorch(path: Path) -> bool:
    """Tell whether a module is marked `pytorch`, and cannot be imported here: its mark is read from its text."""
    if not path.name.startswith("test_") or path.suffix != ".py" or find_spec("torch") is not None:
        return False
    return _PYTORCH.search(path.read_text(encoding="utf-8")) is not None


def left_out_by_folder(collected: Counter[str]) -> Counter[str]:
    """Count the test functions of each folder that are not among `collected`, counts of functions by folder."""
    there: Counter[str] = Counter()
    for path in TESTS.rglob("test_*.py"):
        there[path.relative_to(TESTS).parts[0]] += count_tests(path)
    return there - collected


def count_tests(path: Path) -> int:
    """Return how many test functions a module has, without importing it."""
    return len(_TEST.findall(path.read_text(encoding="utf-8")))


def words_of_marks(mark: str) -> dict[str, list[str]]:
    """Return the modules that give each word to a mark, without importing them; "" stands for a mark without words."""
    found: dict[str, list[str]] = {}
    for path in TESTS.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if f"mark.{mark}" in source:
            for word in _words(ast.parse(source), f"pytest.mark.{mark}"):
                found.setdefault(word, []).append(str(path.relative_to(TESTS)))
    return found


def _words(module: ast.Module, mark: str) -> Iterator[str]:
    calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and ast.unparse(node.func) == mark]
    for call in calls:
        yield from (str(ast.literal_eval(word)) for word in call.args)
    called = {id(call.func) for call in calls if call.args}
    marks = (node for node in ast.walk(module) if isinstance(node, ast.Attribute) and ast.unparse(node) == mark)
    if any(id(node) not in called for node in marks):
        yield ""


def processor_seconds() -> float:
    """Return what this process and its ended children have used: unlike the clock, it knows no neighbours."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
