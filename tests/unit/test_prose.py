"""Plain English in docstrings, names and pages, beyond the docstring rules of ruff."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prose import PHRASES, fragments_in, phrases_in, pronouns_in
from sizes import MOST_LINES, MOST_WORDS, excesses

ROOT = Path(__file__).parents[2]
RULES = {"dev/scripts/prose.py", "tests/unit/test_prose.py"}
"""They list what they forbid."""

Finding = Iterator[tuple[int, str]]


def tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file() and name not in RULES]


def findings(rule: Callable[[str], Finding], names: list[str]) -> list[str]:
    return [f"{name}:{line}: {what}" for name in names for line, what in rule((ROOT / name).read_text())]


def python_files() -> list[str]:
    return [name for name in tracked("*.py") if "_pb2" not in name]


@pytest.mark.slow("it reads every Python file")
def test_docstrings_open_with_a_verb_or_a_noun_phrase() -> None:
    assert findings(lambda text: fragments_in(ast.parse(text)), python_files()) == []


@pytest.mark.slow("it reads every Python file")
def test_identifiers_contain_no_pronouns() -> None:
    assert findings(lambda text: pronouns_in(ast.parse(text)), python_files()) == []


@pytest.mark.slow("it reads every Python file")
def test_comments_and_strings_avoid_phrases_that_need_a_second_reading() -> None:
    assert findings(phrases_in, python_files()) == []


def test_pages_charts_and_scripts_avoid_the_same_phrases() -> None:
    texts = tracked("*.md", "*.yaml", "*.tpl", "*.txt", "*.toml", "*.proto", "Makefile", "*Dockerfile*")
    names = [name for name in texts if not name.startswith(("dev/requirements/", "tests/"))]
    assert findings(_phrases_of_text, names) == []


def _phrases_of_text(text: str) -> Finding:
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, found[0]) for found in PHRASES.finditer(line))


@pytest.mark.parametrize(
    ("docstring", "is_fragment"),
    [
        ("Of the adapters, those that fit.", True),
        ("What a worker holds.", True),
        ("Whether it fits.", True),
        ("Without a key.", True),
        ("Return the adapters that fit.", False),
        ("The adapters that fit.", False),
        ("Only the leader writes.", False),
    ],
)
def test_a_fragment_is_found(docstring: str, is_fragment: bool) -> None:
    tree = ast.parse(f'def function():\n    """{docstring}"""\n')
    assert [first for _, first in fragments_in(tree)] == [docstring] * is_fragment


def test_the_docstring_of_a_test_may_open_with_its_circumstances() -> None:
    assert list(fragments_in(ast.parse('def test_it():\n    """Without a key."""\n'))) == []


def test_a_pronoun_is_found_in_functions_parameters_classes_and_variables() -> None:
    tree = ast.parse(
        "def ask_nobody(ours): theirs = ours\nclass Whoever: pass\nself.somebody = 1\nfor whose in (): pass\n"
    )
    assert {name for _, name in pronouns_in(tree)} == {"ask_nobody", "ours", "theirs", "Whoever", "somebody", "whose"}


def test_the_limits_of_pages_are_checked() -> None:
    pages = {"docs/long.md": "\n" * (MOST_LINES + 1), "docs/words.md": "word " * (MOST_WORDS + 1)}
    assert [problem.partition(" ")[0] for problem in excesses(pages)] == ["docs/", "docs/long.md"]
    assert list(excesses({"docs/design.md": "| | |\n" * 300})) == []
