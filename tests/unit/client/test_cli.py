"""The `tinsmith` command: installed commands, fast help, and one message for a missing extra."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer
from tinsmith.cli import GROUP, MissingExtra, build_app, find_commands, main, run, summary_of

HEAVY_MODULES = ("torch", "transformers", "tinker", "fastapi", "sqlalchemy", "grpc", "httpx", "matplotlib")
PRINT_HEAVY_IMPORTS = f"""
import sys
from tinsmith.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print(",".join(name for name in {HEAVY_MODULES!r} if name in sys.modules))
"""


def command_in(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> dict[str, EntryPoint]:
    """Return the command `paint`, whose module has this source and which needs the extra `brushes`."""
    module = f"painting_{folder.name.replace('-', '_')}"
    (folder / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    return {"paint": EntryPoint("paint", f"{module}:paint [brushes]", GROUP)}


def test_all_packages_register_their_commands() -> None:
    found = set(find_commands())
    assert found == {
        "chat",
        "checkpoints",
        "cluster",
        "demo",
        "doctor",
        "eval",
        "export",
        "import",
        "keys",
        "make-tiny-model",
        "models",
        "parity",
        "promote",
        "runs",
        "serve",
        "tenants",
        "tokenizer",
        "train",
        "version",
    }


@pytest.mark.parametrize("name", find_commands())
def test_a_summary_read_from_the_source_is_the_commands_own(name: str) -> None:
    command = find_commands()[name]
    target = command.load()
    own = target.info.help if isinstance(target, typer.Typer) else target.__doc__
    assert summary_of(command)
    assert summary_of(command) == own.partition("\n")[0]


@pytest.mark.parametrize("module", ["no_such_package.module", "json.no_such_module", "folder_of_brushes"])
def test_a_command_without_readable_source_has_no_summary(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder_of_brushes").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert summary_of(EntryPoint("paint", f"{module}:paint", GROUP)) == ""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["version"], ["version", "--json"]], ids=" ".join)
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    program = [sys.executable, "-c", PRINT_HEAVY_IMPORTS, *arguments]
    output = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert output.splitlines()[-1] == ""


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tinsmith mo", ["models"]),
        ("tinsmith keys ", ["create", "list", "revoke"]),
        ("tinsmith tenants ", ["list", "limit"]),
        ("tinsmith keys revoke --d", ["--data", "--database-url"]),
        ("tinsmith --vers", ["--version"]),
    ],
)
def test_a_shell_completes_commands_subcommands_and_options(
    line: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completions(line, monkeypatch, capsys) == offered


def test_completing_a_command_that_is_not_installed_prints_nothing_into_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = command_in(tmp_path, monkeypatch, "import brushes_of_hair")
    monkeypatch.setattr("tinsmith.cli.find_commands", lambda: commands)
    assert completions("tinsmith paint --", monkeypatch, capsys) == []


def completions(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return bash's completions for a line with the cursor at its end."""
    monkeypatch.setenv("_TINSMITH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    with pytest.raises(SystemExit):
        main([])
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out.split()


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in find_commands())


@pytest.mark.parametrize(
    "source",
    ["import brushes_of_hair\ndef paint(): pass", "def paint():\n    import brushes_of_hair"],
    ids=["imported with the command", "imported by the command as it runs"],
)
def test_a_missing_extra_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    commands = command_in(tmp_path, monkeypatch, source)
    with pytest.raises(MissingExtra) as missing:
        run(commands, ["paint"])
    assert str(missing.value) == (
        "tinsmith paint needs the module brushes_of_hair, which is not installed: run in a checkout of Tinsmith: "
        "uv pip install --constraints dev/requirements/dev.txt '.[brushes]'"
    )


def test_a_missing_extra_ends_with_its_sentence_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = command_in(tmp_path, monkeypatch, "import brushes_of_hair")
    monkeypatch.setattr("tinsmith.cli.find_commands", lambda: commands)
    with pytest.raises(SystemExit) as end:
        main(["paint"])
    assert end.value.code == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_module_missing_from_tinsmith_itself_is_not_blamed_on_an_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = command_in(tmp_path, monkeypatch, "import tinsmith.no_such_module")
    with pytest.raises(ModuleNotFoundError, match=r"tinsmith\.no_such_module"):
        run(commands, ["paint"])


FRAGMENTS = re.compile(r"(And|At|By|For|From|Held|In|Of|Those|To|What|Which|Who|Whom|Whose) ")


def helped(command: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the help of a command, of its parameters and of its subcommands."""
    yield path, command.help or ""
    for parameter in command.params:
        yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from helped(subcommand, f"{path} {name}")


@pytest.mark.parametrize("name", find_commands())
def test_help_is_written_in_sentences_that_stand_alone(name: str) -> None:
    program = typer.main.get_command(build_app(find_commands(), find_commands()[name]))
    assert {place: text for place, text in helped(program, "tinsmith") if FRAGMENTS.match(text)} == {}


@pytest.mark.parametrize(("command", "status", "output"), [("version", 0, "tinsmith "), ("no-such-command", 2, "")])
def test_a_program_writes_all_its_output_and_exits_with_the_status_of_its_command(
    command: str, status: int, output: str
) -> None:
    done = subprocess.run([sys.executable, "-m", "tinsmith", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.startswith(output), bool(done.stderr)) == (status, True, status != 0)
