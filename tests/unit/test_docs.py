"""Documentation that tests guard: references are complete, links resolve, commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import fault_reference
import nbformat
import pytest
from tinsmith_trainer.engines.losses import loss_names

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NOTEBOOKS = sorted(ROOT.glob("docs/**/*.ipynb"))
NAMED_TEST = re.compile(r"\b(tests/[\w/]+\.py)(?:::(\w+))?")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose_of(page: Path) -> str:
    """Return the text of a page, or of a notebook's cells of text."""
    if page.suffix != ".ipynb":
        return page.read_text(encoding="utf-8")
    cells = nbformat.read(page, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.slow("makes every reference table anew, in a process of its own")
def test_the_reference_tables_agree_with_the_code() -> None:
    """Settings, metrics, commands, statuses, calls."""
    checked = subprocess.run(
        [sys.executable, ROOT / "dev" / "scripts" / "reference.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=page_id)
def test_every_relative_link_resolves(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose_of(page)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = page if not target else (page.parent / target).resolve()
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE))
    assert named <= make_targets()


def missing_tests(named: list[tuple[str, str]]) -> list[str]:
    """Return those of (file, function) that are not there; without a function, the file is meant."""
    return [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).exists() or f"def {name}" not in (ROOT / file).read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "recipes.md"], ids=page_id)
def test_every_test_that_is_named_exists(page: Path) -> None:
    """The page of recipes names tests of other projects."""
    assert missing_tests([(file, f"{name}(") for file, name in NAMED_TEST.findall(prose_of(page)) if name]) == []


def test_each_fault_on_the_page_of_errors_has_a_test() -> None:
    assert fault_reference.missing_tests() == []


def test_every_target_of_the_makefile_is_explained_by_make() -> None:
    # These tests may run under make, whose flags are not for this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    shown = subprocess.run(["make"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert {line.split()[0] for line in shown.splitlines()} == make_targets()


def test_every_loss_has_a_section() -> None:
    assert set(loss_names()) <= anchors_of(ROOT / "docs" / "reference" / "losses.md")


def test_every_page_can_be_found_from_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}
    assert [page_id(page) for page in ROOT.glob("docs/**/*.md") if page not in {*linked, index}] == []
    assert "docs/README.md" in (ROOT / "README.md").read_text()
