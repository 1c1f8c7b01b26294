"""The console output of a run."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest
from rich.console import Console
from tinsmith.training.run_logs.console import ConsoleLogger

pytestmark = pytest.mark.pytorch


@pytest.fixture
def written() -> io.StringIO:
    return io.StringIO()


def in_file(written: io.StringIO, total: int | None, seconds_per_call: float = 1.0) -> ConsoleLogger:
    """Return the console's lines; each reading of the clock is so much later."""
    ticks: Iterator[float] = iter(seconds_per_call * tick for tick in range(1000))
    return ConsoleLogger(total, Console(file=written, soft_wrap=True, highlight=False), lambda: next(ticks))


def test_each_step_is_a_line_with_the_main_metrics_in_a_file(written: io.StringIO) -> None:
    logger = in_file(written, 4, seconds_per_call=30.0)
    for step, nll in ((1, 2.0), (2, 1.23456)):
        logger.log_metrics({"train/nll": nll, "optim/lr": 0.1, "train/tokens": 600}, step)
    logger.close()
    assert written.getvalue().splitlines() == [
        "step 1/4  tokens/s 20  nll 2",
        "step 2/4  tokens/s 20  nll 1.235  left 1:00",
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


def test_evaluations_have_a_line_of_their_own(written: io.StringIO) -> None:
    logger = in_file(written, None)
    logger.log_metrics({"loss": 1.5, "test/nll": 2.25, "eval/[a]": 1}, 3)
    logger.log_metrics({"eval/b": 0.5})
    assert written.getvalue().splitlines() == ["step 3  loss 1.5", "step 3  test/nll 2.25  eval/[a] 1", "eval/b 0.5"]


def test_a_loop_without_known_metrics_shows_its_first_numbers(written: io.StringIO) -> None:
    in_file(written, None).log_metrics({"a": 1.0, "text": "none", "b": 2.0, "c": 12345.6, "d": 4.0}, 1)
    assert written.getvalue() == "step 1  a 1  b 2  c 12346\n"


def test_a_rate_that_the_loop_logs_replaces_the_computed_one(written: io.StringIO) -> None:
    logger = in_file(written, None)
    logger.log_metrics({"num_tokens": 10, "time/tokens_per_second": 5.5}, 1)
    assert written.getvalue() == "step 1  tokens/s 5.5\n"
