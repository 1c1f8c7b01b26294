"""The `tinsmith` command. This module finds the installed commands, and runs the requested command.

A command is an entry point in the group `tinsmith.commands`. The entry point names a function, or a `typer.Typer` with
subcommands. The extras of the distribution that the command needs are in brackets after the name of the function:
`serve = "tinsmith_server.cli.serving:serve [server,trainer]"`.
"""

from __future__ import annotations

import ast
import atexit
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import InspectLoader
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Annotated, Any

import typer

from tinsmith.console import AsJson, make_console, print_error
from tinsmith.credentials import UnusableKey

GROUP = "tinsmith.commands"


class MissingExtra(Exception):
    """An error for a command whose packages are not installed.

    `str(error)` ends with the command that installs the packages.
    """

    def __init__(self, command: EntryPoint, module: str) -> None:
        super().__init__(
            f"tinsmith {command.name} needs the module {module}, which is not installed: "
            f"run in a checkout of Tinsmith: {install_line(command.extras)}"
        )


def install_line(extras: Sequence[str]) -> str:
    """Return the command that installs the given extras from a checkout. Tinsmith is not on any package index."""
    return f"uv pip install --constraints dev/requirements/dev.txt '.[{','.join(extras)}]'"


@contextmanager
def naming_extras(command: EntryPoint | None) -> Iterator[None]:
    """Raise MissingExtra if a module imported in this block is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if command is None or not command.extras or error.name is None or error.name.startswith("tinsmith"):
            raise
        raise MissingExtra(command, error.name) from error


def find_commands() -> dict[str, EntryPoint]:
    """Return the entry points by command name, in alphabetical order."""
    return {command.name: command for command in sorted(entry_points(group=GROUP), key=lambda found: found.name)}


def summary_of(command: EntryPoint) -> str:
    """Return the first line of the function's docstring, or the `help` of a `typer.Typer`.

    The line is read from the source code. Without source code, return "".
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
    """Return the source of the module. Parent packages are not imported, unlike with `importlib.util.find_spec`."""
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


REPORTED_PACKAGES = ("tinker", "tinker-cookbook", "torch", "transformers", "peft")


def print_version(
    as_json: AsJson = False,
) -> None:
    """Print the versions of Tinsmith, Python and the main packages."""
    versions = installed_versions()
    if as_json:
        print(json.dumps(versions))
        return
    console = make_console()
    for name, found in versions.items():
        console.print(f"{name:<16} {found or 'not installed'}")


def installed_versions() -> dict[str, str | None]:
    """Return the versions of packages by name. The version is None if a package is not installed.

    No package is imported.
    """
    here = {"tinsmith": _version_of("tinsmith"), "python": platform.python_version()}
    return here | {name: _version_of(name) for name in REPORTED_PACKAGES}


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


HELP = "Train and sample LoRA adapters with the tinker SDK, on your own machines."
COMPLETION = "_TINSMITH_COMPLETE"
"""The variable that a shell sets to request completions."""
COMPLETED_LINE = {"bash": "COMP_WORDS"}
"""The variable that holds the line to complete. Shells that are not listed use `_TYPER_COMPLETE_ARGS`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. The status is 0 for success, 1 for failure, and 2 for misuse.

    Without `arguments`, the command is the program of this process, and the process exits without unloading modules.
    """
    ended: list[int] = []
    if arguments is None:
        # The first registered function is called last.
        atexit.register(_leave_modules, ended)
    try:
        _run(sys.argv[1:] if arguments is None else arguments)
    except SystemExit as leaving:
        if isinstance(leaving.code, int):
            ended.append(leaving.code)
        raise


def _leave_modules(ended: list[int]) -> None:
    """Exit without unloading the modules, because PyTorch takes a second or more to unload.

    All threads have ended before this call. After an error, `ended` is empty, and Python reports the error.
    """
    if not ended:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(ended[0])


def _run(arguments: Sequence[str]) -> None:
    try:
        run(find_commands(), arguments)
    except MissingExtra as missing:
        if COMPLETION in os.environ:  # the shell would print the message into the line being typed
            raise SystemExit(1) from missing
        print_error(str(missing))
        raise SystemExit(1) from missing
    except UnusableKey as error:
        print_error(str(error))
        raise SystemExit(1) from error


def run(commands: Mapping[str, EntryPoint], arguments: Sequence[str]) -> None:
    """Run the requested command. Raises MissingExtra if the command or an imported module is not installed."""
    words = _words_to_complete() if COMPLETION in os.environ else arguments
    requested = next((word for word in words if not word.startswith("-")), None)
    command = commands.get(requested or "")
    with naming_extras(command):
        program = typer.main.get_command(build_app(commands, command))
        hide_types_of_flags(program)
        program(args=list(arguments), prog_name="tinsmith")


def _words_to_complete() -> list[str]:
    """Return the words of the line to complete, without the name of the program."""
    shell = os.environ[COMPLETION].rpartition("_")[2]
    return os.environ.get(COMPLETED_LINE.get(shell, "_TYPER_COMPLETE_ARGS"), "").split()[1:]


def hide_types_of_flags(command: Any) -> None:
    """Remove the `<bool>` that help pages print after flags without a value.

    The flags of subcommands are changed, too.
    """
    for parameter in command.get_params(typer.Context(command)):
        if getattr(parameter, "is_bool_flag", False):
            parameter.metavar = ""
    for subcommand in getattr(command, "commands", {}).values():
        hide_types_of_flags(subcommand)


def build_app(commands: Mapping[str, EntryPoint], requested: EntryPoint | None) -> typer.Typer:
    """Return an app with only the requested command, or with the names and summaries of all commands.

    A help page imports no commands, because the import of torch and the web framework takes seconds.
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
    """Do nothing: because of this callback, typer treats the app as a group of commands, even with only one command."""


def _not_requested() -> None:
    raise AssertionError("only the requested command can run")
