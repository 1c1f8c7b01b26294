"""The programs of `make recipes` do what is said of them: all of them there, about a third of them in every run."""

from __future__ import annotations

import pytest
from support.recipes.program import Program
from support.recipes.programs import PROGRAMS
from support.recipes.running import Runner


def asked_for(program: Program) -> object:
    return pytest.param(program, id=program.name, marks=() if program.every_run else pytest.mark.recipes)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("program", [asked_for(program) for program in PROGRAMS])
def test_a_program_does_what_is_said_of_it(program: Program, runner: Runner) -> None:
    program.run(runner)
