"""A tree of sentences, as text that reads the same on a terminal and in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.text import Text


@dataclass(frozen=True, slots=True)
class Branch:
    """style: rich's, for terminals; a file gets none."""

    text: str
    branches: tuple[Branch, ...] = ()
    style: str = ""


def draw(roots: Iterable[Branch]) -> Iterator[Text]:
    """One line for each branch."""
    for root in roots:
        yield Text(root.text, style=root.style)
        yield from _below(root, "")


def _below(branch: Branch, indent: str) -> Iterator[Text]:
    for number, below in enumerate(branch.branches, start=1):
        is_last = number == len(branch.branches)
        yield Text(indent + ("└─ " if is_last else "├─ ")).append(below.text, style=below.style)
        yield from _below(below, indent + ("   " if is_last else "│  "))
