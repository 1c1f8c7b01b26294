"""Imports of adapters. Each import begins between two turns of the engine, and a separate thread reads the files.

Imported files are not trusted, so the read may end the process. The in-flight marker has a separate entry for an
import. So after the end of the process, no operation is blamed for an import, and no import is blamed for an operation.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.errors import Draining, TrainerError, UserError
from tinsmith_trainer.oplog.attempts import Attempts
from tinsmith_trainer.oplog.model_queues import ModelQueues
from tinsmith_trainer.process.exit import fatal_on_error
from tinsmith_trainer.process.in_flight_marker import InFlightMarker, InFlightWork
from tinsmith_trainer.training.executor import Executor

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Import:
    request: worker_pb2.ImportAdapterRequest
    reply: Future[worker_pb2.ImportAdapterReply] = field(default_factory=Future)
    begun_at: float = 0.0
    read: threading.Event = field(default_factory=threading.Event)

    @property
    def work(self) -> InFlightWork:
        return InFlightWork("import", self.request.model_id, 0)


class Imports:
    """The imports of a worker.

    Used by the engine's thread, except for `submit` and for the reads. `submit` has one caller at a time.
    """

    def __init__(self, executor: Executor, queues: ModelQueues, attempts: Attempts, marker: InFlightMarker) -> None:
        self._executor = executor
        self._queues = queues
        self._attempts = attempts
        self._marker = marker
        self._latest: _Import | None = None

    def submit(self, request: worker_pb2.ImportAdapterRequest) -> Future[worker_pb2.ImportAdapterReply]:
        """Submit an import. Before a new import, the previous import must have a reply.

        The reply fails with TrainerError or Draining.
        """
        latest = self._latest = _Import(request)
        self._queues.between_turns(lambda: self._begin(latest))
        return latest.reply

    def running_seconds(self) -> float:
        """Return how long the read of the current import has run, or 0 if no import is in progress. Thread-safe."""
        latest = self._latest
        is_read = latest is not None and latest.begun_at > 0 and not latest.read.is_set()
        return time.monotonic() - latest.begun_at if latest is not None and is_read else 0.0

    def wait(self) -> None:
        """Wait until no read of an import is in progress.

        If the process ends after this wait, only one cause is possible.
        """
        if self._latest is not None and self._latest.begun_at:
            self._latest.read.wait()

    def end_all(self) -> None:
        """Finish the current import during a stop. Refuse an import that has not begun.

        During a stop, an import that waits for a turn cannot begin.
        """
        self.wait()
        latest = self._latest
        if latest is not None and not latest.begun_at and not latest.reply.done():
            latest.reply.set_exception(Draining("this worker is shutting down"))

    def _begin(self, latest: _Import) -> None:
        """Begin the import.

        If a process has ended during this import before, this thread reads the files while no other work runs. If the
        process ends again, the import is known to be the cause.
        """
        if not latest.reply.set_running_or_notify_cancel():
            return
        if (refusal := self._attempts.refusal(latest.work)) is not None:
            latest.reply.set_exception(UserError(refusal.message))
            return
        latest.begun_at = time.monotonic()
        self._marker.mark_background("imports", latest.work)
        if self._attempts.is_suspect(latest.work):
            self._read(latest)
        else:
            self._read_in_a_thread(latest)

    def _read_in_a_thread(self, latest: _Import) -> None:
        try:
            threading.Thread(target=self._read, args=(latest,), name="importer", daemon=True).start()
        except RuntimeError:  # the limit of threads may be reached
            self._read(latest)

    def _read(self, latest: _Import) -> None:
        # also for errors that are not Exceptions, such as a panic of a library
        with fatal_on_error("an adapter could not be read"):
            answer = self._answer(latest)
        self._marker.mark_background("imports")
        latest.read.set()
        # the attempt has ended, whatever its result
        self._queues.between_turns(lambda: self._attempts.succeeded(latest.work))
        if isinstance(answer, Exception):
            latest.reply.set_exception(answer)
        else:
            latest.reply.set_result(answer)

    def _answer(self, latest: _Import) -> worker_pb2.ImportAdapterReply | Exception:
        """Return the reply, or an error without frames and causes, because frames would keep the files in memory."""
        try:
            return self._executor.import_adapter(latest.request)
        except Exception as error:
            if not isinstance(error, TrainerError):
                log.exception("an adapter could not be read", model_id=latest.request.model_id)
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
