"""A logger for the console. The logger shows a progress bar on a terminal, and writes lines to a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tinker_cookbook.utils import ml_log
from typing_extensions import override

from tinsmith.console import duration, figure, make_console
from tinsmith.training.run_logs.metrics import Plain, numbers_of

HEADLINES = {
    "train/nll": "nll",
    "train_mean_nll": "nll",
    "nll": "nll",
    "train/loss": "loss",
    "dpo_loss": "loss",
    "loss": "loss",
    "env/all/reward/total": "reward",
    "reward": "reward",
    "train/accuracy": "accuracy",
    "accuracy": "accuracy",
    "time/tokens_per_second": "tokens/s",
}
"""The metrics that a line shows, under the names in this library's loops, the cookbook and common loops."""
TOKENS = ("train/tokens", "num_tokens", "env/all/total_ac_tokens")
"""The metrics for the tokens of a step. If the loop logs no rate, the rate is computed from the number of tokens."""
EVALUATIONS = ("eval/", "test/")
MOST_OTHERS = 3


class ConsoleLogger(ml_log.Logger):
    """A logger that shows how many of `total_steps` are done.

    A step is done when its metrics have been logged.
    """

    def __init__(
        self, total_steps: int | None, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or make_console()
        self._total = total_steps
        self._pace = _Pace(clock)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @override
    def log_hparams(self, config: Any) -> None:
        """Log nothing, because the config is longer than a screen and is in `config.json`."""

    @override
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        evaluated = {name: value for name, value in metrics.items() if name.startswith(EVALUATIONS)}
        trained = {name: value for name, value in metrics.items() if name not in evaluated}
        if trained and step is not None:
            self._pace.note(step, trained)
            self._show_step(step, self._pace.rate | headlines(trained))
        if evaluated:
            self._print(_line(step, {name: figure(value) for name, value in evaluated.items()}))

    @override
    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _show_step(self, step: int, figures: dict[str, str]) -> None:
        if not self._console.is_terminal:
            left = self._pace.seconds_left(step, self._total)
            self._print(_line(step, figures | ({} if left is None else {"left": duration(left)}), self._total))
            return
        if self._progress is None or self._task is None:
            self._progress, self._task = self._bar()
        self._progress.update(self._task, completed=step, description=_words(figures))

    def _bar(self) -> tuple[Progress, TaskID]:
        of_total = "step {task.completed:.0f}" + ("" if self._total is None else "/{task.total:.0f}")
        columns = (TextColumn(of_total), BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        progress = Progress(*columns, *times, console=self._console)
        progress.start()
        return progress, progress.add_task("", total=self._total)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, emoji=False)


class _Pace:
    """The speed of the steps that this process has made."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: tuple[int, float] | None = None
        self._noted_at = clock()
        self.rate: dict[str, str] = {}

    def note(self, step: int, metrics: Mapping[str, Plain]) -> None:
        now = self._clock()
        tokens = next((float(metrics[name]) for name in TOKENS if name in metrics), None)
        if tokens is not None and now > self._noted_at:
            self.rate = {"tokens/s": figure(tokens / (now - self._noted_at))}
        self._noted_at = now
        self._began = self._began or (step, now)

    def seconds_left(self, step: int, total: int | None) -> float | None:
        """Return the estimated remaining seconds, or None if no estimate is possible yet."""
        if self._began is None or total is None or step <= self._began[0]:
            return None
        per_step = (self._noted_at - self._began[1]) / (step - self._began[0])
        return max(total - step, 0) * per_step


def headlines(metrics: Mapping[str, Plain]) -> dict[str, str]:
    """Return the metrics of a step to show: the metrics in HEADLINES, or else the first few numbers."""
    known = {HEADLINES[name]: figure(value) for name, value in metrics.items() if name in HEADLINES}
    if known:
        return known
    return {name: figure(value) for name, value in list(numbers_of(metrics).items())[:MOST_OTHERS]}


def _line(step: int | None, figures: Mapping[str, str], total: int | None = None) -> str:
    of_total = "" if total is None else f"/{total}"
    return f"{'' if step is None else f'step {step}{of_total}  '}{_words(figures)}"


def _words(figures: Mapping[str, str]) -> str:
    return "  ".join(f"{name} {value}" for name, value in figures.items())
