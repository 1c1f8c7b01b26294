"""Sweeps over saved weights.

Each example is evaluated only once at each checkpoint, even if a sweep is killed and started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tinker
from rich.progress import Progress
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator

from tinsmith.training.errors import EvaluationError, StateGone
from tinsmith.training.evaluation.examples import DEFAULT_CONCURRENCY, Example, digest_of
from tinsmith.training.evaluation.results import Results, Row, described
from tinsmith.training.evaluation.sources import Checkpoint, Connect, require_different, sampler_of
from tinsmith.training.evaluation.summary import Summary, csv_of, draw_curves, summaries_of
from tinsmith.training.evaluation.tasks import ExampleTask, by_name

logger = logging.getLogger(__name__)

CSV_FILE, CURVES_FILE = "results.csv", "curves.png"
Failure = (EvaluationError, tinker.TinkerError)


@dataclass(slots=True)
class Sweep:
    """The result of a sweep.

    `failures` name the task, the example and the reason. The next sweep in the directory evaluates failed examples
    again.

    `gone` lists the checkpoints that the server does not have any more.
    """

    summaries: Sequence[Summary] = ()
    gone: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def failed(self, checkpoint: Checkpoint, part: str, error: BaseException) -> None:
        message = f"{checkpoint.label}, {part}: {str(error) or type(error).__name__}"
        logger.warning("%s", message)
        self.failures.append(message)


class OfflineEvaluator:
    """An evaluator of checkpoints that writes `results.jsonl`, `results.csv` and `curves.png` to `directory`.

    `tasks` are tasks of this library, or any SamplingClientEvaluator of tinker-cookbook. An evaluator of
    tinker-cookbook is called once for each checkpoint. `connect` opens a session on the server for each checkpoint. At
    most `checkpoints_at_once` checkpoints and `concurrency` examples are evaluated at the same time. A second sweep in
    the same directory evaluates only missing examples.
    """

    def __init__(
        self,
        tasks: Sequence[SamplingClientEvaluator],
        directory: str | Path,
        *,
        connect: Connect = tinker.ServiceClient,
        concurrency: int = DEFAULT_CONCURRENCY,
        checkpoints_at_once: int = 2,
        progress: Progress | None = None,
    ) -> None:
        self._tasks: Mapping[str, SamplingClientEvaluator] = by_name(tasks)
        self._directory = Path(directory)
        self._connect = connect
        self._concurrency = concurrency
        self._checkpoints_at_once = checkpoints_at_once
        self._progress = progress

    def run(self, checkpoints: Sequence[Checkpoint]) -> Sweep:
        """Evaluate like `sweep`, in a program without an event loop."""
        return asyncio.run(self.sweep(checkpoints))

    async def sweep(self, checkpoints: Sequence[Checkpoint]) -> Sweep:
        """Evaluate the checkpoints.

        A failure of one checkpoint, task or example does not affect other checkpoints, tasks or examples.

        Raises ResultsUnfit.
        """
        chosen = require_different(checkpoints)
        fingerprints = {name: fingerprint_of(task) for name, task in self._tasks.items()}
        sweep = Sweep()
        with Results(self._directory, fingerprints) as results:
            limit = asyncio.Semaphore(self._concurrency)
            places = asyncio.Semaphore(self._checkpoints_at_once)
            bar = _Bar(self._progress, len(chosen) * sum(map(len, map(units_of, self._tasks.values()))))
            async with asyncio.TaskGroup() as group:
                for checkpoint in chosen:
                    under_way = _CheckpointSweep(checkpoint, self._tasks, results, sweep, limit, bar)
                    group.create_task(_with_slot(places, under_way.run(self._connect)))
            paths = {checkpoint.path for checkpoint in chosen}
            # Tasks end in any order; report them in the given order.
            rows = [row for task in self._tasks for row in results.rows if row.task == task]
            every = summaries_of([*rows, *(row for row in results.rows if row.task not in self._tasks)])
        sweep.summaries = summaries_of(row for row in rows if row.checkpoint in paths)
        (self._directory / CSV_FILE).write_text(csv_of(every))
        if every:
            draw_curves({"": every}, self._directory / CURVES_FILE)
        return sweep


def units_of(task: SamplingClientEvaluator) -> Sequence[Example | None]:
    """Return the units of evaluation: the examples of a task, or None for an evaluator without visible examples."""
    return task.examples if isinstance(task, ExampleTask) else [None]


def fingerprint_of(task: SamplingClientEvaluator) -> str:
    """Return the fingerprint of the task.

    The fingerprint of an evaluator that is not a task contains only the name of the class.
    """
    return task.fingerprint if isinstance(task, ExampleTask) else digest_of(type(task).__qualname__)


async def _with_slot(places: asyncio.Semaphore, work: Any) -> None:
    async with places:
        await work


class _CheckpointSweep:
    def __init__(
        self,
        checkpoint: Checkpoint,
        tasks: Mapping[str, SamplingClientEvaluator],
        results: Results,
        sweep: Sweep,
        limit: asyncio.Semaphore,
        bar: _Bar,
    ) -> None:
        self._checkpoint = checkpoint
        self._tasks = tasks
        self._results = results
        self._sweep = sweep
        self._limit = limit
        self._bar = bar

    async def run(self, connect: Connect) -> None:
        missing = [
            (name, unit)
            for name, task in self._tasks.items()
            for unit in units_of(task)
            if (self._checkpoint.path, name, unit and unit.id) not in self._results.done
        ]
        everything = sum(len(units_of(task)) for task in self._tasks.values())
        self._bar.advance(everything - len(missing))
        if not missing:
            return
        try:
            async with sampler_of(connect, self._checkpoint) as client, asyncio.TaskGroup() as group:
                for name, unit in missing:
                    group.create_task(self._one(client, name, unit))
        except StateGone as error:
            logger.warning("%s is skipped: %s", self._checkpoint.label, error)
            self._sweep.gone[self._checkpoint.path] = str(error)
            self._bar.advance(len(missing))
        except Failure as error:
            self._sweep.failed(self._checkpoint, "no sampler", error)
            self._bar.advance(len(missing))

    async def _one(self, client: tinker.SamplingClient, name: str, unit: Example | None) -> None:
        try:
            async with self._limit:
                row = await self._row(client, name, unit)
            self._results.add(row)
        except Exception as error:
            if not isinstance(error, Failure):
                logger.exception("task %s", name)
            part = f"task {name}" if unit is None else f"task {name}, example {unit.id}"
            self._sweep.failed(self._checkpoint, part, error)
        finally:
            self._bar.advance(1)

    async def _row(self, client: tinker.SamplingClient, name: str, unit: Example | None) -> Row:
        place, task = self._checkpoint, self._tasks[name]
        if unit is None or not isinstance(task, ExampleTask):
            return Row(place.path, place.label, place.step, name, None, plain_metrics(name, await task(client)))
        result = await task.result(client, unit)
        return Row(place.path, place.label, place.step, name, unit.id, result.scores, described(result))


def plain_metrics(task: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric metrics of an evaluator that is not a task.

    Prefixes that training loops add, and the evaluator's own name, are removed from the names of metrics.
    """
    return {
        name.removeprefix("eval/").removeprefix("test/").removeprefix(f"{task}/"): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float)
    }


class _Bar:
    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("examples", total=total) if progress is not None else None

    def advance(self, number: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, number)
