"""docs/reference/recipes.md lists the programs that `make recipes` runs."""

from __future__ import annotations

from collections import Counter

from support.recipes.checks import ends_below
from support.recipes.page import PAGE, rows_of
from support.recipes.programs.catalog import PROGRAMS
from support.recipes.running import Run


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
    assert list(rows_of(PAGE.read_text())) == [program.name for program in PROGRAMS], "run `make recipes`"


def test_a_check_of_a_metric_that_was_never_written_does_not_hold() -> None:
    assert ends_below("loss", 4).problem(run(6, optim_steps=1)) == "`loss` ends below 4: []"
