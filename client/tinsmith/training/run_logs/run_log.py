"""One call for all the places where people look at a run."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from tinker_cookbook.utils import ml_log
from typing_extensions import override

from tinsmith.training.errors import BackendMissing, MetricsLost
from tinsmith.training.run_logs.backends import RunIdentity, TensorBoardLogger, trackio_logger, wandb_logger
from tinsmith.training.run_logs.console import ConsoleLogger
from tinsmith.training.run_logs.metrics import METRICS_FILE, MetricsHistory, plain_metrics

logger = logging.getLogger(__name__)

Backend = Literal["console", "jsonl", "tensorboard", "wandb", "trackio"]
PACKAGES: Mapping[str, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""The packages that a backend needs and the extra `training` does not bring."""
APPEND_ONLY = ("wandb", "trackio")
"""They take nothing back: a step that is computed again is not logged there again."""


def run_log(
    directory: str | Path,
    *,
    project: str | None = None,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    to: Sequence[Backend] = ("console", "jsonl"),
    total_steps: int | None = None,
) -> RunLog:
    """A logger to everything in `to`; close it, or use it as a context.

    One directory is one run, and a process that goes on with it appends: the first step that it logs says where it is,
    and what `metrics.jsonl` and TensorBoard have of that step and later ones is replaced. `project` and `name` are for
    W&B and trackio.

    Raises BackendMissing, BackendRefused, and ValueError for a name that is none.
    """
    _check(to)
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    history = MetricsHistory(place)
    record = ml_log.JsonLogger(place) if "jsonl" in to else None
    if record is not None and config is not None:
        record.store.write_config(ml_log.dump_config(dict(config)))
    shown = [
        _Guarded(backend, _made(backend, place, project, name, config or {}, total_steps), history.last_step())
        for backend in to
        if backend != "jsonl"
    ]
    return RunLog(place, history, record, shown)


class RunLog(ml_log.Logger):
    """Made by `run_log`.

    `metrics.jsonl` is the run's record: if it cannot be written, MetricsLost is raised. Any other backend that fails
    is reported once, tried again at the next step, and never ends the run.
    """

    def __init__(
        self,
        directory: Path,
        history: MetricsHistory,
        record: ml_log.JsonLogger | None,
        shown: Sequence[_Guarded],
    ) -> None:
        self._directory = directory
        self._history = history
        self._record = record
        self._shown = shown
        self._has_begun = False

    @override
    def log_hparams(self, config: Any) -> None:
        if self._record is not None:
            self._record.store.write_config(ml_log.dump_config(config))
        for backend in self._shown:
            backend.call("log_hparams", config)

    @override
    def enable_event_steps(self) -> None:
        """To be called before the first metrics where some will be of a step that others have passed."""
        for backend in self._shown:
            if hasattr(backend.logger, "enable_event_steps"):
                backend.call("enable_event_steps")

    def begin_at(self, step: int) -> None:
        """Before the first metrics, where those may be of an earlier step: what was logged of `step` and later goes.

        Raises MetricsLost.
        """
        if self._record is not None:
            try:
                self._begin(step)
            except OSError as error:
                raise MetricsLost(f"{self._directory / METRICS_FILE} cannot be written: {error}") from error
        for backend in self._shown:
            if isinstance(backend.logger, TensorBoardLogger):
                backend.logger.begin_at(step)

    @override
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Raises MetricsLost."""
        plain = plain_metrics(metrics)
        self._keep(plain, step)
        for backend in self._shown:
            backend.log_metrics(plain, step)

    @override
    def log_metrics_event(
        self, metrics: dict[str, Any], step: int, step_metric: str, metric_axes: dict[str, str] | None = None
    ) -> None:
        """Of a step that others may have passed, as those of an evaluation beside the run. Raises MetricsLost."""
        plain = plain_metrics(metrics)
        self._keep(plain, step)
        for backend in self._shown:
            backend.log_late_metrics(plain, step, step_metric)

    def _keep(self, plain: dict[str, Any], step: int | None) -> None:
        if self._record is not None:
            try:
                self._begin(step)
                self._record.log_metrics(plain, step)
            except OSError as error:
                at = "" if step is None else f" of step {step}"
                raise MetricsLost(
                    f"metrics{at} cannot be written to {self._directory / METRICS_FILE}: {error}"
                ) from error

    @override
    def log_long_text(self, key: str, text: str) -> None:
        for backend in self._shown:
            backend.call("log_long_text", key, text)

    @override
    def close(self) -> None:
        for backend in self._shown:
            backend.close()

    @override
    def sync(self) -> None:
        for backend in self._shown:
            backend.call("sync")

    @override
    def get_logger_url(self) -> str | None:
        """W&B's page of this run."""
        return next((url for backend in self._shown if (url := backend.logger.get_logger_url())), None)

    @property
    @override
    def store(self) -> Any:
        """The cookbook's, of this directory, where JSONL is written."""
        return None if self._record is None else self._record.store

    def _begin(self, step: int | None) -> None:
        if not self._has_begun and step is not None:
            self._history.forget_from(step)
            self._has_begun = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.close()


class _Guarded:
    """A backend whose failures stay its own. `had_step`: the last that an earlier process logged."""

    def __init__(self, name: str, backend: ml_log.Logger, had_step: int | None) -> None:
        self.name = name
        self.logger = backend
        self._had_step = had_step if name in APPEND_ONLY else None
        self._failures = 0

    def log_metrics(self, metrics: dict[str, Any], step: int | None) -> None:
        if not self._has_had(step):
            self.call("log_metrics", metrics, step)

    def log_late_metrics(self, metrics: dict[str, Any], step: int, step_metric: str) -> None:
        """Of a step that others have passed, which W&B alone has to be told."""
        if self.name != "wandb":
            self.log_metrics(metrics, step)
        elif not self._has_had(step):
            self.call("log_metrics_event", metrics, step, step_metric)

    def _has_had(self, step: int | None) -> bool:
        return step is not None and self._had_step is not None and step <= self._had_step

    def call(self, method: str, *arguments: Any) -> None:
        try:
            getattr(self.logger, method)(*arguments)
        except Exception as error:
            self._failures += 1
            if self._failures == 1:
                failure = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                logger.warning("%s fails, and the run goes on without it: %s", self.name, failure)

    def close(self) -> None:
        self.call("close")
        if self._failures > 1:
            logger.warning("%s has failed %d times in this run", self.name, self._failures)


def _check(to: Sequence[str]) -> None:
    for backend in to:
        if backend not in get_args(Backend):
            raise ValueError(f"there is no backend {backend!r}; there are {', '.join(get_args(Backend))}")
        package = PACKAGES.get(backend)
        if package is not None and importlib.util.find_spec(package) is None:
            raise BackendMissing(f"logging to {backend} needs a package that is not installed: pip install {package}")


def _made(
    backend: Backend,
    directory: Path,
    project: str | None,
    name: str | None,
    config: Mapping[str, Any],
    total_steps: int | None,
) -> ml_log.Logger:
    if backend == "console":
        return ConsoleLogger(total_steps)
    if backend == "tensorboard":
        made = TensorBoardLogger(directory / "tensorboard")
        made.log_hparams(dict(config))
        return made
    identity = RunIdentity.of(directory, project, name)
    if backend == "wandb":
        return wandb_logger(identity, config, directory)
    return trackio_logger(identity, config)
