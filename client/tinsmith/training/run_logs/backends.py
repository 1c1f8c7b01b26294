"""Loggers for TensorBoard, W&B and trackio."""

from __future__ import annotations

import importlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tinker_cookbook.exceptions import ConfigurationError
from tinker_cookbook.utils import ml_log
from typing_extensions import override

from tinsmith.files import write_whole
from tinsmith.training.errors import BackendRefused
from tinsmith.training.run_logs.metrics import numbers_of

IDENTITY_FILE = "run.json"
DEFAULT_PROJECT = "tinsmith"
STEP_AXIS = "training/step"
"""The cookbook's name for the axis of steps."""


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The identity of a run at a service.

    `is_resumed` is true if an earlier process in this directory used the identity.
    """

    run_id: str
    project: str
    name: str
    is_resumed: bool

    @classmethod
    def of(cls, directory: Path, project: str | None, name: str | None) -> Self:
        """Return the identity that the directory stores.

        A project or name that is given later does not change the identity.
        """
        file = directory / IDENTITY_FILE
        if file.exists():
            return cls(**json.loads(file.read_text()), is_resumed=True)
        run_id = secrets.token_hex(8)
        # Trackio identifies a run by its name, and many directories are called `out`.
        made = {"run_id": run_id, "project": project or DEFAULT_PROJECT, "name": name or f"{directory.name}-{run_id}"}
        write_whole(file, json.dumps(made) + "\n")
        return cls(**made, is_resumed=False)


def wandb_logger(identity: RunIdentity, config: Mapping[str, Any], directory: Path) -> ml_log.Logger:
    """Return a W&B logger. The environment variable `WANDB_MODE` sets the mode of W&B.

    Raises BackendRefused, for example without a key.
    """
    # The cookbook's logger has no parameters for these; W&B reads them from the environment.
    variables = {"WANDB_RUN_ID": identity.run_id} | ({"WANDB_RESUME": "allow"} if identity.is_resumed else {})
    try:
        with _environment(variables):
            return _Wandb(identity.project, dict(config), directory, identity.name)
    except ConfigurationError as error:
        reason = str(error).partition("\n")[0]
        raise BackendRefused(
            f"{reason} Alternatively, set WANDB_MODE=offline to keep the run in {directory} without a key"
        ) from error


def trackio_logger(identity: RunIdentity, config: Mapping[str, Any]) -> ml_log.Logger:
    """Return a trackio logger.

    The environment variable `TRACKIO_DIR` sets the location of trackio's data. Raises BackendRefused.
    """
    try:
        return _Trackio(identity, config)
    except Exception as error:
        raise BackendRefused(f"trackio does not start: {error}") from error


class _Wandb(ml_log.WandbLogger):
    """The cookbook's W&B logger, without the request for the run's URL at each step, which logs a warning when offline.

    W&B accepts no metrics for an earlier step. If some metrics arrive late, W&B's own steps number the calls, and
    `training/step` is the axis of all metrics.
    """

    _steps_are_metrics = False

    @override
    def enable_event_steps(self) -> None:
        if not self._steps_are_metrics:
            self.run.define_metric(STEP_AXIS)
            self.run.define_metric("*", step_metric=STEP_AXIS, step_sync=False)
            self._steps_are_metrics = True

    @override
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self._steps_are_metrics and step is not None:
            self.run.log(metrics | {STEP_AXIS: step})
        else:
            self.run.log(metrics, step=step)

    @override
    def log_metrics_event(
        self, metrics: dict[str, Any], step: int, step_metric: str, metric_axes: dict[str, str] | None = None
    ) -> None:
        self.enable_event_steps()
        self.log_metrics(metrics | {step_metric: step}, step)


class _Trackio(ml_log.TrackioLogger):
    """The cookbook's trackio logger, changed so that it continues the run of an earlier process."""

    def __init__(self, identity: RunIdentity, config: Mapping[str, Any]) -> None:
        trackio: Any = importlib.import_module("trackio")
        resume = "allow" if identity.is_resumed else "never"
        self.run = trackio.init(project=identity.project, name=identity.name, config=dict(config), resume=resume)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context. Variables that the user has set stay unchanged."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


class TensorBoardLogger(ml_log.Logger):
    """A logger that writes events for TensorBoard.

    From the first logged step on, the events of earlier processes are hidden.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None
        self._config: str | None = None
        self._step = 0
        self._begins_at: int | None = None

    def begin_at(self, step: int) -> None:
        """Hide the events of earlier processes from `step` on."""
        self._begins_at = step

    @override
    def log_hparams(self, config: Any) -> None:
        self._config = json.dumps(ml_log.dump_config(config), indent=2, default=str)

    @override
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log the numbers. Numbers without a step belong to the step of the previous call."""
        self._step = self._step if step is None else step
        writer = self._opened()
        for name, number in numbers_of(metrics).items():
            writer.add_scalar(name, number, self._step)
        writer.flush()

    @override
    def log_long_text(self, key: str, text: str) -> None:
        self._opened().add_text(key, text, self._step)

    @override
    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _opened(self) -> Any:
        """Open the file of events at the first step. A new file of events begins with the first logged step."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            writer: Any = SummaryWriter
            self._writer = writer(
                str(self._directory), purge_step=self._begins_at if self._begins_at is not None else self._step
            )
            if self._config is not None:
                self._writer.add_text("config", f"```\n{self._config}\n```", self._step)
        return self._writer
