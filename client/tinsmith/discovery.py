"""Which commands are installed, and what each does, without importing any of them.

A command is an entry point of the group `tinsmith.commands`: a function, or a `typer.Typer` with
commands of its own. Its extras, in brackets behind the name, are those of the distribution that
it needs: `serve = "tinsmith_server.cli.serving:serve [server,trainer]"`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import InspectLoader
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points

GROUP = "tinsmith.commands"


class MissingExtra(Exception):
    """A command's packages are not installed. `str(error)` ends with the line that installs them."""

    def __init__(self, command: EntryPoint, module: str) -> None:
        super().__init__(
            f"tinsmith {command.name} needs the module {module}, which is not installed: "
            f"in a checkout of Tinsmith, run {install_line(command.extras)}"
        )


def install_line(extras: Sequence[str]) -> str:
    """Return the command that installs these extras from a checkout; no package index has Tinsmith."""
    return f"uv pip install --constraints dev/requirements/dev.txt '.[{','.join(extras)}]'"


@contextmanager
def naming_extras(command: EntryPoint | None) -> Iterator[None]:
    """Raises MissingExtra where what the command imports inside is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if command is None or not command.extras or error.name is None or error.name.startswith("tinsmith"):
            raise
        raise MissingExtra(command, error.name) from error


def find_commands() -> dict[str, EntryPoint]:
    """Command name to entry point, in alphabetical order."""
    return {command.name: command for command in sorted(entry_points(group=GROUP), key=lambda found: found.name)}


def summary_of(command: EntryPoint) -> str:
    """The first line of the function's docstring, or a `typer.Typer`'s `help`, read from the source.

    Empty where there is no source to read.
    """
    source = _source_of(command.module)
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(name=command.attr):
                return (ast.get_docstring(node) or "").partition("\n")[0]
            case ast.Assign(targets=[ast.Name(id=command.attr)], value=ast.Call() as call):
                return _help_of(call)
    return ""


def _source_of(module: str) -> str:
    """Goes from package to package by itself: `importlib.util.find_spec` would import the parents."""
    folders: Sequence[str] | None = None
    name, spec = "", None
    for part in module.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, folders)
        if spec is None:
            return ""
        folders = spec.submodule_search_locations
    if spec is None or not isinstance(spec.loader, InspectLoader):
        return ""
    return spec.loader.get_source(module) or ""


def _help_of(typer_call: ast.Call) -> str:
    for keyword in typer_call.keywords:
        if keyword.arg == "help" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    return ""
