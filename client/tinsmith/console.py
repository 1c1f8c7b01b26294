"""Terminal output, and the options that several commands share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

BaseUrl = Annotated[str | None, typer.Option(help="Server URL; default: TINKER_BASE_URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
"""The options that several commands share."""


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that prints text unchanged, and lets the terminal break long lines.

    Rich would print `:train:` in the ID of a run as an emoji, and would read brackets in a path as a style. To print
    with a style, use the argument `style` or a `rich.text.Text`.
    """
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Print one line on standard error."""
    make_console(stderr=True).print(message)


def fail(command: str, message: str) -> NoReturn:
    """Print each line of the message on standard error, with the command's name before the line. Exit with status 1."""
    for line in message.splitlines() or [""]:
        print_error(f"tinsmith {command}: {line}")
    raise typer.Exit(1)


def figure(value: float | str | None) -> str:
    """Return a number with four significant digits. Other values are returned as text."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds, for example `1:05` for 65 s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(frozen=True, slots=True)
class Branch:
    """A line in a tree, and the branches below this line. `style` is a style of rich, used only on terminals."""

    text: str
    branches: tuple[Branch, ...] = ()
    style: str = ""


def draw(roots: Iterable[Branch]) -> Iterator[Text]:
    """Yield a line for each branch."""
    for root in roots:
        yield Text(root.text, style=root.style)
        yield from _below(root, "")


def _below(branch: Branch, indent: str) -> Iterator[Text]:
    """Yield the lines below a branch."""
    for number, below in enumerate(branch.branches, start=1):
        is_last = number == len(branch.branches)
        yield Text(indent + ("└─ " if is_last else "├─ ")).append(below.text, style=below.style)
        yield from _below(below, indent + ("   " if is_last else "│  "))
