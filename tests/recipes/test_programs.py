"""The programs of `make recipes` do what is said of them: all of them there, about a third of them in every run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import support.recipes.python
from support.recipes.program import Program
from support.recipes.programs.catalog import PROGRAMS
from support.recipes.running import Runner
from support.waiting import until

HANGS = """\
import subprocess
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
child.wait()
"""


def case(program: Program) -> object:
    return pytest.param(program, id=program.name, marks=() if program.every_run else pytest.mark.recipes)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("program", [case(program) for program in PROGRAMS])
def test_a_program_keeps_its_documented_promises(program: Program, runner: Runner) -> None:
    program.run(runner)


def test_a_program_that_takes_too_long_is_ended_with_all_that_it_started(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support.recipes.python, "PROGRAM_SECONDS", 2.0)
    hangs = tmp_path / "hangs.py"
    hangs.write_text(HANGS)
    status, output = runner.python.run([str(hangs)], tmp_path, os.environ, "")
    assert status == -signal.SIGKILL
    until(lambda: not runs(int(output)))


def runs(pid: int) -> bool:
    """Return true if the process runs: it is neither gone nor an uncollected zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
