"""The tables of docs/reference/models.md, as `make zoo` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from support.zoo.checks import Findings

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- written by `make zoo` -->", "<!-- until here -->"
HEADER = ("Sampled with", "Model types")
MEMORIES = {
    "keys and values": "rows",
    "own cache, by blocks": "cache",
    "own cache, prompts at once": "cache, prompts at once",
}
SENTENCES = ("What is refused, in its sentence", "Model types")
REFUSED = "refused"

Cells = tuple[str, ...]


def written(findings: Sequence[Findings]) -> str:
    """Return both tables: the families by their way of sampling, and those with a refusal by its sentence."""
    memories = _grouped((memory_of(each), each.model_type) for each in findings)
    refusals = _grouped((sentence, each.model_type) for each in findings for sentence in sentences_of(each))
    return f"{_table(HEADER, memories)}\n\n{_table(SENTENCES, refusals)}"


def memory_of(found: Findings) -> str:
    return MEMORIES[found.memory] if found.memory else REFUSED


def sentences_of(found: Findings) -> list[str]:
    return [found.refused] if found.refused else list(found.notes)


def rows_of(page: str) -> tuple[Mapping[str, str], Mapping[str, list[str]]]:
    """Return the way of sampling and the sentences of a page by model type."""
    memories: dict[str, str] = {}
    sentences: dict[str, list[str]] = {}
    known = {*MEMORIES.values(), REFUSED}
    for line in _between(page).splitlines():
        what, _, names = line.strip("| ").partition(" | ")
        for model_type in re.findall(r"`(\w+)`", names):
            if what in known:
                memories[model_type] = what
            else:
                sentences.setdefault(model_type, []).append(what)
    return memories, sentences


def with_tables(page: str, tables: str) -> str:
    begin, end = _places(page)
    return f"{page[:begin]}\n\n{tables}\n\n{page[end:]}"


def _between(page: str) -> str:
    begin, end = _places(page)
    return page[begin:end]


def _places(page: str) -> tuple[int, int]:
    return page.index(BEGIN) + len(BEGIN), page.index(END)


def _grouped(pairs: Iterable[tuple[str, str]]) -> Iterable[Cells]:
    """Return one row for each left side, with all of its model types."""
    groups: dict[str, list[str]] = {}
    for what, model_type in pairs:
        groups.setdefault(what, []).append(f"`{model_type}`")
    return [(what, ", ".join(names)) for what, names in groups.items()]


def _table(header: Cells, rows: Iterable[Cells]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
