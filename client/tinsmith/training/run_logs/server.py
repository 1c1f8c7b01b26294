"""A logger that reports metrics to the server, which shows them next to the steps of the run."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import tinker
from tinker_cookbook.utils import ml_log
from typing_extensions import override

from tinsmith.training.errors import MetricsNotReported, NotOffered, TrainingError
from tinsmith.training.run_logs.metrics import numbers_of
from tinsmith.training.server_calls import refusal, send

logger = logging.getLogger(__name__)

POINTS_AT_ONCE = 100
NAMES_IN_A_POINT = 64
NAME_CHARACTERS = 128
"""The limits of one request, of one point and of one name."""
MOST_WAITING = 10_000
"""The points that wait for the server. Further points replace the oldest ones."""
TOGETHER_SECONDS = 1.0
"""The time in which points are collected for one request."""
CLOSE_SECONDS = 10.0
NOT_OFFERED = "this server keeps no metrics that a program reports"


class ServerLogger(ml_log.Logger):
    """A logger that reports the metrics of a client's training run. A thread sends them, so that no step waits.

    A server without this call, such as hosted Tinker, gets no metrics. Any other failure is raised at the next call of
    `log_metrics`, and the thread tries again.
    """

    def __init__(self, client: tinker.TrainingClient, total_steps: int | None) -> None:
        """Start. `total_steps` lets the server show how long the run will take."""
        self._client = client
        self._address = f"/api/v1/training_runs/{client.model_id}/metrics"
        self._total_steps = total_steps
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)
        self._changed = threading.Condition()
        self._closing = False
        self._is_offered = True
        self._failure: TrainingError | None = None
        self._thread = threading.Thread(target=self._send_all, name="metrics-to-server", daemon=True)
        self._thread.start()

    @override
    def log_hparams(self, config: Any) -> None:
        """Log nothing, because the server has the settings of the model."""

    @override
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Queue the numbers of a step. Raises the failure of an earlier request."""
        if step is not None and self._is_offered:
            with self._changed:
                self._waiting.extend(points_of(numbers_of(metrics), step, time.time()))
                self._changed.notify()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @override
    def close(self) -> None:
        """Send what is queued, for at most CLOSE_SECONDS."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)
        if self._waiting:
            raise MetricsNotReported(
                f"the metrics of {len(self._waiting)} steps were not reported before the run ended"
            )

    def _send_all(self) -> None:
        while points := self._next_points():
            try:
                self._send(points)
            except NotOffered:
                logger.debug(NOT_OFFERED)
                self._is_offered = False
                self._waiting.clear()
                return
            except MetricsNotReported as refused:
                self._failure = refused  # the same points would be refused again
                self._drop(points)
            except Exception as error:
                self._failure = MetricsNotReported(f"metrics of the run cannot be reported: {error}")
                if self._closing:
                    return
                time.sleep(TOGETHER_SECONDS)
            else:
                self._drop(points)

    def _next_points(self) -> list[dict[str, Any]]:
        """Wait for points, and return them. Return no points at the end. They stay queued until they are sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._changed.wait_for(lambda: self._closing, TOGETHER_SECONDS)
            return list(self._waiting)[:POINTS_AT_ONCE]

    def _drop(self, sent: Sequence[Mapping[str, Any]]) -> None:
        """Remove the points that were sent. Newer points may have replaced some of them in the meantime."""
        with self._changed:
            for point in sent:
                if self._waiting and self._waiting[0] is point:
                    self._waiting.popleft()

    def _send(self, points: Sequence[Mapping[str, Any]]) -> None:
        body: dict[str, Any] = {"metrics": points}
        if self._total_steps is not None:
            body["total_steps"] = self._total_steps
        send(
            self._client,
            "POST",
            self._address,
            body,
            explain=lambda status, answer: refusal(status, answer, refused=MetricsNotReported, not_offered=NOT_OFFERED),
        )


def points_of(numbers: Mapping[str, float], step: int, at: float) -> list[dict[str, Any]]:
    """Return the points of a step. Values that JSON cannot hold are left out, and long names are cut.

    `at` is in Unix seconds.
    """
    finite = [(name[:NAME_CHARACTERS], value) for name, value in numbers.items() if math.isfinite(value)]
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    return [
        {"step": step, "time": moment, "values": dict(finite[first : first + NAMES_IN_A_POINT])}
        for first in range(0, len(finite), NAMES_IN_A_POINT)
    ]
