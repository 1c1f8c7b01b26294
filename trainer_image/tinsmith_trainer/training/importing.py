"""Adapters that come in: each is begun between two turns of the engine, and read in a thread of its own.

Their files are their senders', so that reading them may end the process: while they are read they are in the in-flight
marker as work of their own. No operation is to blame for that end, and no import for an operation's.
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
    """Used by the engine's thread, but for the reading itself, and for `submit`, which is for one caller at a time."""

    def __init__(self, executor: Executor, queues: ModelQueues, attempts: Attempts, marker: InFlightMarker) -> None:
        self._executor = executor
        self._queues = queues
        self._attempts = attempts
        self._marker = marker
        self._latest: _Import | None = None

    def submit(self, request: worker_pb2.ImportAdapterRequest) -> Future[worker_pb2.ImportAdapterReply]:
        """The reply fails with a TrainerError, or with Draining. The one before must have been answered."""
        latest = self._latest = _Import(request)
        self._queues.between_turns(lambda: self._begin(latest))
        return latest.reply

    def running_seconds(self) -> float:
        """Since the one that is read was begun; 0: none is. Thread-safe."""
        latest = self._latest
        is_read = latest is not None and latest.begun_at > 0 and not latest.read.is_set()
        return time.monotonic() - latest.begun_at if latest is not None and is_read else 0.0

    def wait(self) -> None:
        """Until nothing is being read, so that what the process ends of next is of one work alone."""
        if self._latest is not None and self._latest.begun_at:
            self._latest.read.wait()

    def end_all(self) -> None:
        """At a stop, when there are no turns any more: what is under way is read, what was not begun is refused."""
        self.wait()
        latest = self._latest
        if latest is not None and not latest.begun_at and not latest.reply.done():
            latest.reply.set_exception(Draining("this worker is shutting down"))

    def _begin(self, latest: _Import) -> None:
        """One that a process has ended at is read here, by itself, so that the next end is known to be its own."""
        if not latest.reply.set_running_or_notify_cancel():
            return
        if (refusal := self._attempts.refusal(latest.work)) is not None:
            latest.reply.set_exception(UserError(refusal.message))
            return
        latest.begun_at = time.monotonic()
        self._marker.beside("imports", latest.work)
        if self._attempts.is_suspect(latest.work):
            self._read(latest)
        else:
            self._read_in_a_thread(latest)

    def _read_in_a_thread(self, latest: _Import) -> None:
        try:
            threading.Thread(target=self._read, args=(latest,), name="importer", daemon=True).start()
        except RuntimeError:  # there may be no more threads
            self._read(latest)

    def _read(self, latest: _Import) -> None:
        with fatal_on_error("an adapter could not be read"):  # what is no Exception, such as a panic of a library's
            answer = self._answer(latest)
        self._marker.beside("imports")
        latest.read.set()
        self._queues.between_turns(lambda: self._attempts.succeeded(latest.work))  # whatever came of it, it has ended
        if isinstance(answer, Exception):
            latest.reply.set_exception(answer)
        else:
            latest.reply.set_result(answer)

    def _answer(self, latest: _Import) -> worker_pb2.ImportAdapterReply | Exception:
        """Returns an error without the frames that it came through, and those of its causes: they hold the files."""
        try:
            return self._executor.import_adapter(latest.request)
        except Exception as error:
            if not isinstance(error, TrainerError):
                log.exception("an adapter could not be read", model_id=latest.request.model_id)
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
