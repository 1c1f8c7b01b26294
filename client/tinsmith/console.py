"""The one place where the `tinsmith` command makes consoles."""

from __future__ import annotations

from rich.console import Console


def make_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that prints text as it is, and lets the terminal break long lines.

    Rich would print `:train:` in the id of a run as an emoji, and take brackets in a path for a style. Styles
    are given as `style`, or in a `rich.text.Text`.
    """
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False, soft_wrap=True)
