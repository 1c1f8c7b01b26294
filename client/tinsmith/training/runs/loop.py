"""The loop of a run that trains on a file of examples. After a kill, the same command resumes the run.

A resumed run has the same result as a run without a kill.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import tinker
from tinker import types

from tinsmith.training.run_logs.run_log import RunLog, run_log
from tinsmith.training.runs.config import Config, DataConfig, RunConfig
from tinsmith.training.runs.data import learning_rate_at
from tinsmith.training.runs.objective import Example, Objective, OnStart, RunKind, RunStart
from tinsmith.training.runs.opening import OpenRun, opened
from tinsmith.training.runs.outcome import Outcome, finish
from tinsmith.training.runs.rendering import choose_rendering

STANDARD_ERROR = 2


class Stopped(Exception):
    """An error that ends a run after a request to stop, when the state of the run is saved."""

    def __init__(self, step: int, total_steps: int) -> None:
        super().__init__(
            f"stopped after step {step} of {total_steps}, which is saved; the same command resumes from there"
        )


FIRST_SIGNAL = "stopping and saving after the current step; press Ctrl-C again to stop without saving"
SECOND_SIGNAL = "stopping without saving"


def write_to_stderr(sentence: str) -> None:
    """Write to standard error from a signal handler.

    `sys.stderr` is not used, because the interrupted code may hold the lock of the stream.
    """
    with suppress(OSError):
        os.write(STANDARD_ERROR, f"\n{sentence}\n".encode())


@dataclass(slots=True)
class StopRequest:
    """A handler of SIGINT and SIGTERM. The first signal requests a stop, and the second signal ends the process."""

    requested: bool = False
    say: Callable[[str], None] = write_to_stderr
    _before: dict[int, Any] = field(default_factory=dict)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            self.say(FIRST_SIGNAL)
            return
        self.say(SECOND_SIGNAL)
        signal.signal(number, self._before[number])
        signal.raise_signal(number)

    @classmethod
    @contextmanager
    def listening(cls, say: Callable[[str], None] = write_to_stderr) -> Iterator[StopRequest]:
        request = cls(say=say)
        for number in (signal.SIGINT, signal.SIGTERM):
            request._before[number] = signal.signal(number, request)
        try:
            yield request
        finally:
            for restored, before in request._before.items():
                signal.signal(restored, before)


def run(kind: RunKind[Config, Example], config: Config, on_start: OnStart) -> Outcome:
    """Start or resume the training, and train to the end.

    Raises RunError, Stopped, SaveFailed, and the errors of the SDK.
    """
    assert isinstance(config, DataConfig)
    examples = kind.read(config)
    with opened(config, examples.digest) as open_run:
        rendering = choose_rendering(config.renderer, open_run.tokenizer, config.model)
        state = None if open_run.resumed is None else open_run.resumed.loop_state["work"]
        work = kind.begin(config, examples, rendering, open_run.client, state)
        total = min(len(work.batches), config.max_steps or len(work.batches))
        counted = {**work.data.described(), "renderer": rendering.name}
        on_start(RunStart(total, open_run.step, counted))
        with logged(config, total, open_run.client) as log, StopRequest.listening() as stop:
            steps = _Steps(config, open_run, work, log, total)
            steps.go_on(stop)
        return finish(config, open_run.manager, open_run.client, total, counted, steps.last, work.panels)


def logged(config: RunConfig, total_steps: int, client: tinker.TrainingClient) -> RunLog:
    return run_log(
        config.out,
        project=config.project,
        name=config.name,
        config=config.model_dump(mode="json"),
        to=("jsonl", *config.logs),
        total_steps=total_steps,
        training_client=client,
    )


def adam_at(config: RunConfig, total_steps: int, step: int) -> types.AdamParams:
    """Return the parameters of the optimizer for `step`. Steps count from 0."""
    return types.AdamParams(
        learning_rate=learning_rate_at(step, total_steps, config.learning_rate, config.schedule, config.warmup_steps),
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        grad_clip_norm=config.grad_clip_norm,
    )


def is_every(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


class _Steps:
    """The steps that remain in a run. `last` is the evaluation after the last step."""

    def __init__(self, config: DataConfig, open_run: OpenRun, work: Objective, log: RunLog, total: int) -> None:
        self._config = config
        self._manager = open_run.manager
        self._work = work
        self._log = log
        self._total = total
        self._adam = partial(adam_at, config, total)
        self.step = open_run.step
        self.last: Mapping[str, float] = {}

    def go_on(self, stop: StopRequest) -> None:
        """Make the remaining steps. Raises Stopped."""
        self._manager.is_due = lambda step: step == self._total or stop.requested
        if self.step == 0:
            self._log.log_metrics(self._work.evaluate(), 0)
        elif self.step == self._total:
            self.last = self._work.evaluate()
        while self.step < self._total and not (stop.requested and self._manager.saved_step == self.step):
            self._one()
        self._manager.wait()
        if self.step < self._total:
            raise Stopped(self.step, self._total)

    def _one(self) -> None:
        """Make one step, then log the step, and then save.

        A step is logged before the save, so no step is missing from the log, even if a repeated step is logged twice.
        """
        began = time.monotonic()
        adam = self._adam(self.step)
        metrics = self._work.step(self.step, adam)
        metrics |= self._progress(adam, metrics["train/tokens"], time.monotonic() - began)
        self.step += 1
        if self.step == self._total or is_every(self._config.eval_every, self.step):
            self.last = self._work.evaluate()
            metrics |= self.last
        self._log.log_metrics(metrics, self.step)
        state = {"work": self._work.state()}
        self._manager.maybe_save(self._work.client, self.step, loop_state=state, metrics=metrics)

    def _progress(self, adam: types.AdamParams, tokens: float, seconds: float) -> dict[str, float]:
        return {
            "optim/lr": adam.learning_rate,
            "progress/epoch": self._work.batches.epoch_after(self.step),
            "progress/done_frac": (self.step + 1) / self._total,
            "time/step": seconds,
            "time/tokens_per_second": tokens / seconds,
        }
