"""What a run says on the console."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest
from rich.console import Console
from tinsmith.training.run_logs.console import ConsoleLogger, headlines
from tinsmith.training.run_logs.scalars import Plain

pytestmark = pytest.mark.pytorch


@pytest.fixture
def written() -> io.StringIO:
    return io.StringIO()


def in_file(written: io.StringIO, total: int | None, seconds_per_call: float = 1.0) -> ConsoleLogger:
    """Each look at the clock is so much later."""
    ticks: Iterator[float] = iter(seconds_per_call * tick for tick in range(1000))
    return ConsoleLogger(total, Console(file=written, soft_wrap=True, highlight=False), lambda: next(ticks))


def test_in_a_file_each_step_is_a_line_with_what_matters(written: io.StringIO) -> None:
    logger = in_file(written, 4, seconds_per_call=30.0)
    for step, nll in ((1, 2.0), (2, 1.23456)):
        logger.log_metrics({"train/nll": nll, "optim/lr": 0.1, "train/tokens": 600}, step)
    logger.close()
    assert written.getvalue().splitlines() == [
        "step 1/4  tokens/s 20  nll 2",
        "step 2/4  tokens/s 20  nll 1.235  left 1:00",
    ]


def test_a_loops_own_rate_is_the_one_that_is_told(written: io.StringIO) -> None:
    logger = in_file(written, None)
    logger.log_metrics({"num_tokens": 10, "time/tokens_per_second": 5.5}, 1)
    assert written.getvalue() == "step 1  tokens/s 5.5\n"


def test_evaluations_have_a_line_of_their_own_with_their_names(written: io.StringIO) -> None:
    logger = in_file(written, 4)
    logger.log_metrics({"train/nll": 2.0, "eval/held_out/nll": 2.5}, 1)
    logger.log_metrics({"eval/[math]/accuracy": 0.5}, None)
    assert written.getvalue().splitlines() == [
        "step 1/4  nll 2",
        "step 1  eval/held_out/nll 2.5",
        "eval/[math]/accuracy 0.5",
    ]


def test_on_a_terminal_there_is_a_bar_that_ends_with_the_run(written: io.StringIO) -> None:
    console = Console(file=written, force_terminal=True, width=100)
    logger = ConsoleLogger(2, console)
    for step in (1, 2):
        logger.log_metrics({"loss": 1.5, "what": "[/bold]"}, step)
    logger.close()
    shown = written.getvalue()
    assert re.search(r"step 2/2 .*━.*loss 1\.5", shown)
    assert shown.endswith("\x1b[?25h"), "the cursor is back"


def test_metrics_of_a_loop_with_names_of_its_own_are_the_first_few_numbers() -> None:
    metrics: dict[str, Plain] = {"kind": "a", "mine": 1.0, "other": 2, "third": 3, "fourth": 4}
    assert headlines(metrics) == {"mine": "1", "other": "2", "third": "3"}
