"""Evaluations during training. Weights are saved in the order of calls, and sampled while training continues."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import tinker
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator, TrainingClientEvaluator

from tinsmith.training.errors import EvaluationError
from tinsmith.training.evaluation.examples import DEFAULT_CONCURRENCY, ExampleResult
from tinsmith.training.evaluation.intervals import Estimate
from tinsmith.training.evaluation.offline import plain_metrics
from tinsmith.training.evaluation.results import Results, Row, described
from tinsmith.training.evaluation.tasks import ExampleTask, by_name, estimates_of, metrics_of

if TYPE_CHECKING:
    # It imports wandb if that is installed.
    from tinker_cookbook.utils import ml_log

logger = logging.getLogger(__name__)

Evaluator = SamplingClientEvaluator | TrainingClientEvaluator
STEP_METRIC = "eval/step"
Returned = TypeVar("Returned")


@dataclass(slots=True)
class Evaluated:
    """The evaluation of the weights after `step`.

    `metrics` are the logged numbers; `estimates` have the same names, and contain intervals. `failures` say why a task
    has no metrics. `results` has one entry for each task with scores of single examples.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    estimates: dict[str, Estimate] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    results: dict[str, list[ExampleResult]] = field(default_factory=dict)


class InlineEvaluator:
    """An evaluator that runs at each step that `every` divides, while training continues.

    `maybe_evaluate` saves the weights in the order of the training client's calls, and returns. Sampling and grading
    run in a thread. At most `at_once` evaluations run at the same time, and at most `waiting` further evaluations wait.
    The server stores the weights of all running and waiting evaluations. If `waiting` evaluations wait already, a
    further evaluation is skipped, logged, and listed in `skipped`. Finished results are logged in the caller's thread,
    at the next call and in `wait`, for the step of the evaluation.

    A TrainingClientEvaluator calls the training client between two steps, so training waits for a
    TrainingClientEvaluator. In an asyncio program with a TrainingClientEvaluator, call `await
    asyncio.to_thread(evaluator.maybe_evaluate, …)`.

    The evaluator writes the answers and scores of each example to `directory`, like an OfflineEvaluator. `on_result` is
    called after the logger. At the end of a context (`with` or `async with`), the evaluator waits for running
    evaluations. An error in the block cancels running evaluations.
    """

    def __init__(
        self,
        tasks: Sequence[Evaluator],
        *,
        every: int,
        logger: ml_log.Logger | None = None,
        directory: str | Path | None = None,
        at_once: int = 1,
        waiting: int = 0,
        concurrency: int = DEFAULT_CONCURRENCY,
        on_result: Callable[[Evaluated], None] | None = None,
    ) -> None:
        if every < 1 or at_once < 1 or waiting < 0:
            raise EvaluationError(f"every is {every}, at_once {at_once}, waiting {waiting}; the minimum is 1, 1 and 0")
        self._tasks: Mapping[str, Evaluator] = by_name(tasks)
        self._every = every
        self._logger = logger
        self._directory = Path(directory) if directory is not None else None
        self._most = at_once + waiting
        self._on_result = on_result
        self._thread = _LoopThread()
        self._places = asyncio.Semaphore(at_once)
        self._limit = asyncio.Semaphore(concurrency)
        self._under_way: list[Future[Evaluated]] = []
        self.skipped: list[int] = []
        self.finished: list[Evaluated] = []
        # W&B accepts metrics of earlier steps only if this is announced before the first metrics.
        getattr(logger, "enable_event_steps", lambda: None)()

    def maybe_evaluate(self, training_client: tinker.TrainingClient, step: int) -> bool:
        """Evaluate the current weights if `every` divides `step`. Step 0 is evaluated, too.

        Return whether `every` divides `step`.

        A failed evaluation raises no error, but is logged and listed in `finished`. Raises the errors of the logger and
        of `on_result`.
        """
        self.report()
        if step % self._every:
            return False
        if len(self._under_way) >= self._most:
            logger.warning("the evaluation of step %d is skipped: %d others are running", step, len(self._under_way))
            self.skipped.append(step)
            return False
        evaluated = Evaluated(step)
        self._follow(evaluated, training_client)
        sampling = {name: task for name, task in self._tasks.items() if isinstance(task, SamplingClientEvaluator)}
        saved = training_client.save_weights_and_get_sampling_client() if sampling else None
        self._under_way.append(self._thread.start(self._evaluate(evaluated, saved, sampling)))
        return True

    def report(self) -> None:
        """Log the evaluations that have finished since the last call. Do not wait for running evaluations."""
        ended = [future for future in self._under_way if future.done()]
        self._under_way = [future for future in self._under_way if future not in ended]
        for future in ended:
            self._log(future.result())

    def wait(self) -> None:
        """Wait until all evaluations are finished and logged."""
        for future in list(self._under_way):
            future.exception()
        self.report()

    async def drain(self) -> None:
        """Wait like `wait`, but in an asyncio program."""
        await asyncio.gather(*map(asyncio.wrap_future, self._under_way), return_exceptions=True)
        self.report()

    def close(self) -> None:
        """Wait for all evaluations, then end the thread."""
        try:
            self.wait()
        finally:
            self._thread.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._thread.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.drain()
        finally:
            self._thread.end()

    def _follow(self, evaluated: Evaluated, training_client: tinker.TrainingClient) -> None:
        """Evaluate the tasks that call the training client.

        The evaluation's calls of the training client must precede the calls of the next step.
        """
        for name, task in self._tasks.items():
            if isinstance(task, TrainingClientEvaluator):
                work = self._plain(evaluated, name, task(training_client))
                self._thread.start(_recording_failure(evaluated, name, work)).result()

    async def _evaluate(
        self, evaluated: Evaluated, saved: Any, tasks: Mapping[str, SamplingClientEvaluator]
    ) -> Evaluated:
        if saved is None:
            return evaluated
        async with self._places:
            try:
                client = await saved
            except Exception as error:
                evaluated.failures |= dict.fromkeys(tasks, f"the weights could not be saved: {error}")
                return evaluated
            await asyncio.gather(*(self._task(evaluated, name, task, client) for name, task in tasks.items()))
            self._keep(evaluated)
        return evaluated

    async def _task(
        self, evaluated: Evaluated, name: str, task: SamplingClientEvaluator, client: tinker.SamplingClient
    ) -> None:
        if not isinstance(task, ExampleTask):
            await _recording_failure(evaluated, name, self._plain(evaluated, name, task(client)))
        else:
            await _recording_failure(evaluated, name, self._scored(evaluated, name, task.results(client, self._limit)))

    async def _scored(self, evaluated: Evaluated, name: str, scoring: Coroutine[Any, Any, list[ExampleResult]]) -> None:
        evaluated.results[name] = await scoring
        estimates = estimates_of(evaluated.results[name])
        evaluated.metrics |= metrics_of(name, estimates)
        evaluated.estimates |= {f"eval/{name}/{metric}": interval for metric, interval in estimates.items()}

    async def _plain(self, evaluated: Evaluated, name: str, scoring: Coroutine[Any, Any, dict[str, float]]) -> None:
        metrics = plain_metrics(name, await scoring)
        evaluated.metrics |= {f"eval/{name}/{metric}": value for metric, value in metrics.items()}

    def _keep(self, evaluated: Evaluated) -> None:
        if self._directory is None:
            return
        label = f"step {evaluated.step}"
        tasks = {name: task for name, task in self._tasks.items() if isinstance(task, ExampleTask)}
        try:
            with Results(self._directory, {name: task.fingerprint for name, task in tasks.items()}) as kept:
                for name, results in evaluated.results.items():
                    for result in results:
                        row = Row(label, label, evaluated.step, name, result.example, result.scores, described(result))
                        _add(kept, row, evaluated)
        except (EvaluationError, OSError) as error:
            evaluated.failures["answers"] = f"the answers could not be written: {error}"

    def _log(self, evaluated: Evaluated) -> None:
        for name, reason in evaluated.failures.items():
            logger.warning("the evaluation of step %d by %s failed: %s", evaluated.step, name, reason)
        self.finished.append(evaluated)
        if self._logger is not None and evaluated.metrics:
            _log_event(self._logger, evaluated)
        if self._on_result is not None:
            self._on_result(evaluated)


def _add(kept: Results, row: Row, evaluated: Evaluated) -> None:
    """Write a row of results. A row with a value that JSON cannot represent, such as minus infinity, is lost."""
    try:
        kept.add(row)
    except (ValueError, TypeError) as error:
        message = f"example {row.example} of {row.task} was not written: {error}"
        evaluated.failures["answers"] = "; ".join([*filter(None, [evaluated.failures.get("answers")]), message])


def _log_event(log: ml_log.Logger, evaluated: Evaluated) -> None:
    """Log the metrics of a past step.

    Newer versions of the cookbook have a separate call for metrics of a past step.
    """
    if hasattr(log, "log_metrics_event"):
        log.log_metrics_event(evaluated.metrics, evaluated.step, STEP_METRIC)
    else:
        log.log_metrics(evaluated.metrics, step=evaluated.step)


async def _recording_failure(evaluated: Evaluated, name: str, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception as error:
        evaluated.failures[name] = f"{type(error).__name__}: {error}"


class _LoopThread:
    """An event loop in a daemon thread. This event loop is independent of the caller's event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, work: Coroutine[Any, Any, Returned]) -> Future[Returned]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run, args=(self._loop,), name="tinsmith-evaluation", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self) -> None:
        """Cancel all tasks that still run in the event loop."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
