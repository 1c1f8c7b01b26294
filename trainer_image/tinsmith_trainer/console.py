"""The one place where the trainer's commands make consoles."""

from __future__ import annotations

from rich.console import Console


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is, and lets the terminal break long lines.

    Rich would print `:train:` in the id of a run as an emoji, and take brackets in a path for a style.
    """
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False, soft_wrap=True)
