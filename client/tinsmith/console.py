"""Terminal output of the commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that prints text as it is, and lets the terminal break long lines.

    Rich would print `:train:` in the id of a run as an emoji, and take brackets in a path for a style. Styles
    are given as `style`, or in a `rich.text.Text`.
    """
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False, soft_wrap=True)


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
