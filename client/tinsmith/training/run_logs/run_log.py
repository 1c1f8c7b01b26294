"""`run_log`: one logger for all places where a run can be observed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

import tinker
from tinker_cookbook.utils import ml_log
from typing_extensions import override

from tinsmith.training.errors import BackendMissing, MetricsLost
from tinsmith.training.run_logs.backends import RunIdentity, TensorBoardLogger, trackio_logger, wandb_logger
from tinsmith.training.run_logs.console import ConsoleLogger
from tinsmith.training.run_logs.metrics import METRICS_FILE, MetricsHistory, plain_metrics
from tinsmith.training.run_logs.server import ServerLogger

logger = logging.getLogger(__name__)

Backend = Literal["console", "jsonl", "tensorboard", "wandb", "trackio"]
PACKAGES: Mapping[str, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""The packages of backends that the extra `training` does not install, by the name of the backend."""
APPEND_ONLY = ("wandb", "trackio")
"""The backends that cannot remove logged metrics.

A backend that cannot remove metrics does not log a repeated step again.
"""


def run_log(
    directory: str | Path,
    *,
    project: str | None = None,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    to: Sequence[Backend] = ("console", "jsonl"),
    total_steps: int | None = None,
    training_client: tinker.TrainingClient | None = None,
) -> RunLog:
    """Return a logger that writes to every backend in `to`, and reports to the server of `training_client`.

    Close the logger at the end, or use the logger as a context.

    Each directory holds the logs of one run. A process that resumes the run appends to the logs. In `metrics.jsonl` and
    TensorBoard, the first step that a new process logs replaces the same step and all later steps. `project` and `name`
    are for W&B and trackio.

    Raises BackendMissing, BackendRefused, and ValueError for an unknown backend.
    """
    _check(to)
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    history = MetricsHistory(place)
    record = ml_log.JsonLogger(place) if "jsonl" in to else None
    if record is not None and config is not None:
        record.store.write_config(ml_log.dump_config(dict(config)))
    shown = [
        _Guarded(
            backend, _backend_logger(backend, place, project, name, config or {}, total_steps), history.last_step()
        )
        for backend in to
        if backend != "jsonl"
    ]
    if training_client is not None:
        shown.append(_Guarded("the server", ServerLogger(training_client, total_steps), None))
    return RunLog(place, history, record, shown)


class RunLog(ml_log.Logger):
    """A logger that `run_log` returns.

    The file `metrics.jsonl` is the record of the run. A failed write to `metrics.jsonl` raises MetricsLost. A failure
    of another backend is reported once, and the next step tries the backend again. A failure of another backend never
    ends the run.
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
        """Prepare the backends for metrics of earlier steps. Call this method before any metrics are logged."""
        for backend in self._shown:
            if hasattr(backend.logger, "enable_event_steps"):
                backend.call("enable_event_steps")

    def begin_at(self, step: int) -> None:
        """Remove the metrics of `step` and later steps. Call this method before metrics of an earlier step are logged.

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
        """Log the metrics of a step. Raises MetricsLost."""
        plain = plain_metrics(metrics)
        self._keep(plain, step)
        for backend in self._shown:
            backend.log_metrics(plain, step)

    @override
    def log_metrics_event(
        self, metrics: dict[str, Any], step: int, step_metric: str, metric_axes: dict[str, str] | None = None
    ) -> None:
        """Log the metrics of a step that may be in the past, for example the metrics of an evaluation.

        Raises MetricsLost.
        """
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
        """Return the URL of the run at W&B, or None without W&B."""
        return next((url for backend in self._shown if (url := backend.logger.get_logger_url())), None)

    @property
    @override
    def store(self) -> Any:
        """Return the cookbook's store for this directory, if metrics are written as JSONL."""
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
    """A wrapper around a backend that keeps failures away from other backends.

    `had_step` is the last step that earlier processes logged.
    """

    def __init__(self, name: str, backend: ml_log.Logger, had_step: int | None) -> None:
        self.name = name
        self.logger = backend
        self._had_step = had_step if name in APPEND_ONLY else None
        self._failures = 0

    def log_metrics(self, metrics: dict[str, Any], step: int | None) -> None:
        if not self._has_had(step):
            self.call("log_metrics", metrics, step)

    def log_late_metrics(self, metrics: dict[str, Any], step: int, step_metric: str) -> None:
        """Log the metrics of a past step. Only W&B has a separate call for metrics of a past step."""
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
                logger.warning("%s fails, and the run continues without it: %s", self.name, failure)

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


def _backend_logger(
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
        logger = TensorBoardLogger(directory / "tensorboard")
        logger.log_hparams(dict(config))
        return logger
    identity = RunIdentity.of(directory, project, name)
    if backend == "wandb":
        return wandb_logger(identity, config, directory)
    return trackio_logger(identity, config)
