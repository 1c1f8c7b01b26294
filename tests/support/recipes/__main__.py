"""`make recipes`: run every program, or the named ones with what they need, and write docs/reference/recipes.md."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.recipes.page import PAGE, Outcome, with_outcome
from support.recipes.program import Program, models_for
from support.recipes.programs.catalog import PROGRAMS
from support.recipes.running import Runner
from support.recipes.workshop import workshop


def main(selected: Sequence[str]) -> int:
    """Run the command, and return the exit status."""
    if unknown := set(selected) - {program.name for program in PROGRAMS}:
        print(f"there is no program of the name {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    needed = {program.after for program in PROGRAMS if program.name in selected}
    chosen = [program for program in PROGRAMS if not selected or program.name in {*selected, *needed}]
    with tempfile.TemporaryDirectory(prefix="recipes-") as folder, workshop(Path(folder), models_for(chosen)) as runner:
        outcomes = [_run(program, runner) for program in chosen]
    failed = [outcome.program.name for outcome in outcomes if outcome.failure]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} programs did what they should", *failed, sep="\n")
    return 1 if failed else 0


def _run(program: Program, runner: Runner) -> Outcome:
    try:
        outcome = Outcome(program, run=program.run(runner))
    except AssertionError as error:
        outcome = Outcome(program, failure=str(error))
    print(f"{program.name:50} {outcome.failure or f'{outcome.seconds} s: {outcome.counters}'}", flush=True)
    PAGE.write_text(with_outcome(PAGE.read_text(), outcome, PROGRAMS))
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
