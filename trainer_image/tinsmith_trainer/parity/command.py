"""The command `tinsmith parity`, also available as `python -m tinsmith_trainer.parity.command`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import structlog
import typer

from tinsmith_trainer.process import gc_pause
from tinsmith_trainer.process.output import make_console

if TYPE_CHECKING:
    from tinsmith_trainer.parity.sides import Compared

EXIT_DIFFERENT, EXIT_MISUSED = 1, 2


def parity(
    engine: Annotated[
        list[str],
        typer.Option(
            help="Repeatable: peft, nemo-rl, miles, peft-reference or module:factory; with flags: nemo-rl:ranks=2."
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="Model directory or hub id; default: a generated tiny model.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps, of two forward-backward calls each.")] = 6,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed for the adapter and the data.")] = 0,
    atol: Annotated[float, typer.Option(min=0, help="Largest accepted difference.")] = 1e-4,
) -> None:
    """Train the same adapter on the same data with two or more engines, and compare each with the first, step by step.

    The exit status is 0 if the engines agree, 1 if they differ, 2 if nothing could be compared.
    """
    with gc_pause():
        from tinsmith_trainer.errors import TrainerError
        from tinsmith_trainer.options import UsageError
        from tinsmith_trainer.parity.sides import options_of, parse_choice, run_gate

    if len(engine) < 2:
        _fail("Give --engine at least twice, once for each side.")
    with _logs_on_standard_error(), _model_or_tiny(model) as directory:
        try:
            choices = [parse_choice(text) for text in engine]
            options = [options_of(choice, model=directory, rank=rank) for choice in choices]
            compared = run_gate(choices, options, steps=steps, rank=rank, seed=seed)
            agreed = [_report(f"{engine[0]} and {each.other.text}", each, rank, seed, atol) for each in compared]
        except (ValueError, UsageError, TrainerError) as error:
            _fail(str(error))
    raise typer.Exit(0 if all(agreed) else EXIT_DIFFERENT)


@contextmanager
def _logs_on_standard_error() -> Iterator[None]:
    """Log to standard error. Ranks may take minutes to start, and standard output contains only the table."""
    before = structlog.get_config()
    plain = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[*before["processors"][:-1], plain],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


@contextmanager
def _model_or_tiny(model: str | None) -> Iterator[str]:
    if model is not None:
        yield model
        return
    from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory(prefix="tinsmith-parity-") as directory:
        yield str(make_tiny_model(Path(directory)))


def _report(sides: str, compared: Compared, rank: int, seed: int, tolerance: float) -> bool:
    """Print the table and the differences beyond the tolerance.

    Return whether all differences are within the tolerance.
    """
    from tinsmith_trainer.parity.compare import describe, first_beyond, render_table

    console = make_console()
    title = f"{sides}: {compared.base.architecture}, rank {rank}, seed {seed}"
    console.print(render_table(title, compared.plan, compared.differences, tolerance))
    beyond = first_beyond(compared.differences, tolerance)
    for difference in beyond:
        console.print(f"{describe(difference, tolerance)}.", style="red")
    if not beyond:
        console.print(f"Within {tolerance:g} in every step.", style="green")
    return not beyond


def _fail(sentence: str) -> NoReturn:
    make_console(stderr=True).print(f"tinsmith parity: {sentence}")
    raise typer.Exit(EXIT_MISUSED)


if __name__ == "__main__":
    typer.run(parity)
