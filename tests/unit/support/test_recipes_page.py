"""docs/reference/recipes.md says what `make recipes` runs: programs, arguments and checks."""

from __future__ import annotations

from collections import Counter

from support.recipes.checks import asked, ends_below
from support.recipes.page import PAGE, PROMISED, Outcome, promised, rows_of, with_outcome
from support.recipes.program import Program, recipe
from support.recipes.programs.catalog import PROGRAMS
from support.recipes.running import Run

PROGRAM = recipe("recipes.sl_loop", [ends_below("nll", 4), asked(optim_step=2)], model_name="a/b")
OTHER = Program("other", ("-m", "module"), [])
PAGE_BEFORE = "Before\n<!-- written by `make recipes` -->\nold\n<!-- until here -->\nafter\n"


def run(*losses: float, optim_steps: int) -> Run:
    return Run(
        metrics=[{"nll": loss} for loss in losses],
        checkpoints=[],
        requests=Counter({"optim_step": optim_steps, "retrieve_future": 9}),
        operations=Counter(done=3),
        stored=frozenset(),
        output="",
        seconds=1.4,
    )


def test_the_page_has_a_row_for_each_program_and_no_other() -> None:
    written = [row[:PROMISED] for row in rows_of(PAGE.read_text()).values()]
    assert written == [promised(program) for program in PROGRAMS], "run `make recipes`"


def test_about_a_third_of_the_programs_is_in_every_run_with_all_that_they_come_after() -> None:
    every_run = {program.name for program in PROGRAMS if program.every_run}
    assert 1 / 4 <= len(every_run) / len(PROGRAMS) <= 1 / 2
    names = [program.name for program in PROGRAMS]
    assert len(set(names)) == len(names)
    for program in PROGRAMS:
        if program.after is not None:
            assert names.index(program.after) < names.index(program.name)
            assert program.after in every_run or not program.every_run


def test_a_run_writes_its_own_row_and_keeps_the_others() -> None:
    page = with_outcome(PAGE_BEFORE, Outcome(PROGRAM, run=run(6, 3, optim_steps=2)), [OTHER, PROGRAM])
    page = with_outcome(page, Outcome(OTHER, failure="it hung"), [OTHER, PROGRAM])
    assert page.startswith("Before\n")
    assert page.endswith("<!-- until here -->\nafter\n")
    assert "1 of 2 programs" in page
    assert "| sl_loop | `model_name=a/b` | `nll` ends below 4; 2 `optim_step` |" in page
    rows = rows_of(page)
    assert list(rows) == ["other", "sl_loop"]
    assert [row[:PROMISED] for row in rows.values()] == [promised(OTHER), promised(PROGRAM)]
    assert rows["sl_loop"][PROMISED : PROMISED + 2] == ("2 `optim_step`, 3 operations done", "1")
    assert rows["other"][-1] == "**no**"
    assert list(rows_of(with_outcome(page, Outcome(PROGRAM, failure="it hung"), [PROGRAM]))) == ["sl_loop"]


def test_whatever_does_not_hold_is_told_with_what_was_seen() -> None:
    told = [check.problem(run(6, 5, optim_steps=1)) for check in PROGRAM.checks]
    assert told == ["`nll` ends below 4: [6, 5]", "2 `optim_step`: {'optim_step': 1, 'retrieve_future': 9}"]


def test_a_check_of_a_metric_that_was_never_written_does_not_hold() -> None:
    assert ends_below("loss", 4).problem(run(6, optim_steps=1)) == "`loss` ends below 4: []"


def test_arguments_are_shown_without_what_differs_from_run_to_run() -> None:
    program = Program("x", ("-m", "module", "a=1", "log_path={folder}/log"), [])
    assert program.arguments == "a=1"
