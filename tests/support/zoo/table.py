"""The tables of docs/reference/models.md, as `make zoo` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from support.zoo.checks import Findings

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- written by `make zoo` -->", "<!-- until here -->"
HEADER = ("Model type", "Sampled with", "Largest difference")
MEMORIES = {
    "keys and values": "rows",
    "own cache, by blocks": "cache",
    "own cache, prompts at once": "cache, prompts at once",
}
SENTENCES = ("Model type", "What is refused, in its sentence")
NOTHING = "-"

Cells = tuple[str, ...]


def written(findings: Sequence[Findings]) -> str:
    """Return both tables: the findings of each family, and the refused ones."""
    refusals = [(f"`{each.model_type}`", sentence) for each in findings for sentence in sentences_of(each)]
    return f"{_table(HEADER, map(row_of, findings))}\n\n{_table(SENTENCES, refusals)}"


def row_of(found: Findings) -> Cells:
    refused = "refused" if found.refused or found.weights_apart is not None else NOTHING
    memory = MEMORIES[found.memory] if found.memory else refused
    apart = [distance for distance in _distances(found) if distance is not None]
    return (f"`{found.model_type}`", memory, f"{max(apart):.0e}" if apart else NOTHING)


def sentences_of(found: Findings) -> list[str]:
    return [found.refused] if found.refused else list(found.notes)


def shape_of(row: Cells) -> Cells:
    """Return a row without its numbers, which differ from machine to machine."""
    return tuple(re.sub(r"^\d.*", "a number", cell) for cell in row)


def rows_of(page: str) -> tuple[Mapping[str, Cells], Mapping[str, list[str]]]:
    """Return the row and the sentences of a page by model type."""
    rows: dict[str, Cells] = {}
    sentences: dict[str, list[str]] = {}
    for line in _between(page).splitlines():
        cells = tuple(cell.strip() for cell in line.strip("| ").split(" | "))
        if len(cells) == len(HEADER) and cells[0].startswith("`"):
            rows[cells[0].strip("`")] = cells
        elif len(cells) == len(SENTENCES) and cells[0].startswith("`"):
            sentences.setdefault(cells[0].strip("`"), []).append(cells[1])
    return rows, sentences


def with_tables(page: str, tables: str) -> str:
    begin, end = _places(page)
    return f"{page[:begin]}\n\n{tables}\n\n{page[end:]}"


def _between(page: str) -> str:
    begin, end = _places(page)
    return page[begin:end]


def _places(page: str) -> tuple[int, int]:
    return page.index(BEGIN) + len(BEGIN), page.index(END)


def _distances(found: Findings) -> tuple[float | None, float | None, float | None]:
    return found.weights_apart, found.gap, found.export_apart


def _table(header: Cells, rows: Iterable[Cells]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
