"""Every behaviour of the fakes of NeMo RL has its source written down, and Tinsmith uses nothing else of it."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.nemo_rl.fakes import FAKES

ROOT = Path(__file__).parents[5]
PACKAGE = ROOT / "trainer_image" / "tinsmith_trainer"
ELSEWHERE = "engines/miles"
ASSUMPTIONS = tomllib.loads((ROOT / "tests" / "support" / "nemo_rl" / "assumptions.toml").read_text())
FOREIGN = ("nemo_rl", "megatron.bridge")


def assumed() -> dict[str, list[dict[str, Any]]]:
    return {module: entries for module, entries in ASSUMPTIONS.items() if isinstance(entries, list)}


def imported() -> Iterator[tuple[str, str]]:
    for path in PACKAGE.rglob("*.py"):
        if ELSEWHERE in path.as_posix():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(FOREIGN):
                yield from ((node.module, name.name) for name in node.names)
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith(FOREIGN) for name in node.names), path


def names(modules: dict[str, list[dict[str, Any]]]) -> set[tuple[str, str]]:
    return {(module, entry["name"]) for module, entries in modules.items() for entry in entries}


def test_every_fake_has_its_original_written_down_and_the_other_way_round() -> None:
    assert names(assumed()) == {(module, name) for module, contents in FAKES.items() for name in contents}


def test_nothing_else_of_nemo_rl_is_imported() -> None:
    assert set(imported()) == names(assumed())


def test_every_assumption_has_a_source_and_a_text() -> None:
    for entries in assumed().values():
        for entry in entries:
            assert set(entry) == {"name", "file", "function", "says"}
            assert entry["file"].endswith(".py")
            assert all(entry.values())


def test_the_source_was_read_at_the_commits_that_images_are_built_from() -> None:
    versions = tomllib.loads((ROOT / "trainer_image" / "versions.toml").read_text())
    assert ASSUMPTIONS["nemo_rl"] == versions["nemo-rl"]["commit"]
    assert ASSUMPTIONS["megatron_bridge"] == versions["megatron-bridge"]["commit"]
