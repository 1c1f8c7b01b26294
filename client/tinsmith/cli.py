"""The `tinsmith` command: finds the commands of the installed packages and runs the one asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, version
from typing import Annotated, Any

import typer

from tinsmith.console import make_console
from tinsmith.credentials import UnusableKey
from tinsmith.discovery import MissingExtra, find_commands, naming_extras, summary_of

HELP = "Train and sample LoRA adapters with the tinker SDK, on your own machines."
COMPLETION = "_TINSMITH_COMPLETE"
"""The variable by which a shell asks for completions."""
COMPLETED_LINE = {"bash": "COMP_WORDS"}
"""The variable that has the line to complete; `_TYPER_COMPLETE_ARGS` in all other shells."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 failed, 2 misused."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        run(find_commands(), arguments)
    except MissingExtra as missing:
        if COMPLETION in os.environ:  # the shell would print it into the line that is being typed
            raise SystemExit(1) from missing
        make_console(stderr=True).print(str(missing))
        raise SystemExit(1) from missing
    except UnusableKey as error:
        make_console(stderr=True).print(str(error), markup=False, soft_wrap=True)
        raise SystemExit(1) from error


def run(commands: Mapping[str, EntryPoint], arguments: Sequence[str]) -> None:
    """Run the requested command. Raises MissingExtra when it, or a module that it imports, is not installed."""
    words = _words_to_complete() if COMPLETION in os.environ else arguments
    requested = next((word for word in words if not word.startswith("-")), None)
    command = commands.get(requested or "")
    with naming_extras(command):
        program = typer.main.get_command(build_app(commands, command))
        hide_types_of_flags(program)
        program(args=list(arguments), prog_name="tinsmith")


def _words_to_complete() -> list[str]:
    """Return the words after the program's name."""
    shell = os.environ[COMPLETION].rpartition("_")[2]
    return os.environ.get(COMPLETED_LINE.get(shell, "_TYPER_COMPLETE_ARGS"), "").split()[1:]


def hide_types_of_flags(command: Any) -> None:
    """Remove the `<bool>` that help pages print behind each flag, which takes no value; also in subcommands."""
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_bool_flag", False):
            parameter.metavar = ""
    for subcommand in getattr(command, "commands", {}).values():
        hide_types_of_flags(subcommand)


def build_app(commands: Mapping[str, EntryPoint], requested: EntryPoint | None) -> typer.Typer:
    """Return an app with the requested command alone, or for a help page with all of them by name and summary.

    Importing torch and the web framework to print a help page would take seconds.
    """
    app = typer.Typer(name="tinsmith", help=HELP, no_args_is_help=True, rich_markup_mode="rich")
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


def _print_version(requested: bool) -> None:
    if requested:
        print(f"tinsmith {version('tinsmith')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keep `tinsmith` a group of commands, even with a single one installed."""


def _not_requested() -> None:
    raise AssertionError("only the requested command can run")
