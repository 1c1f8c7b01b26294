"""The `tinsmith` command: finds the commands of the installed packages and runs the one asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import typer
from rich.console import Console

from tinsmith.discovery import MissingExtra, find_commands, naming_extras, summary_of

HELP = "Train and sample LoRA adapters with the tinker SDK, on your own machines."


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 done, 1 failed, 2 misused."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        run(find_commands(), arguments)
    except MissingExtra as missing:
        Console(stderr=True, highlight=False).print(str(missing), markup=False, soft_wrap=True)
        raise SystemExit(1) from missing


def run(commands: Mapping[str, EntryPoint], arguments: Sequence[str]) -> None:
    """Raises MissingExtra when the command, or something it imports on its way, is not installed."""
    requested = next((argument for argument in arguments if not argument.startswith("-")), None)
    command = commands.get(requested or "")
    with naming_extras(command):
        build_app(commands, command)(args=list(arguments), prog_name="tinsmith")


def build_app(commands: Mapping[str, EntryPoint], requested: EntryPoint | None) -> typer.Typer:
    """The requested command alone, or for a help page all of them by name and summary.

    Importing torch and the web framework to print a help page would take seconds.
    """
    app = typer.Typer(name="tinsmith", help=HELP, no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
    app.callback()(_root)
    if requested is not None:
        _add(app, requested.name, requested.load())
        return app
    for name, command in commands.items():
        app.command(name, help=summary_of(command))(_not_requested)
    return app


def _add(app: typer.Typer, name: str, target: typer.Typer | Callable[..., Any]) -> None:
    if isinstance(target, typer.Typer):
        app.add_typer(target, name=name)
    else:
        app.command(name)(target)


def _root() -> None:
    """Keeps `tinsmith` a group of commands, even with a single one installed."""


def _not_requested() -> None:
    raise AssertionError("only the requested command can run")
