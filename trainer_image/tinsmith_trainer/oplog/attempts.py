"""Work during which processes ended, and the decision whether the work is attempted again.

Without a limit, every replay would repeat a batch that is too large for the memory, and kill the worker, while all
other models wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.oplog import result_tables
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.oplog.journal_tables import Operation
from tinsmith_trainer.process.in_flight_marker import InFlightMarker, InFlightWork

log = structlog.get_logger(__name__)

SILENT = "none, as when the system kills a process for lack of memory"
ADVICE = {
    worker_pb2.FORWARD_BACKWARD: "Send fewer or shorter datums in a call, or give the worker more memory.",
    worker_pb2.CREATE_MODEL: "Ask for a lower rank, or give the worker more memory.",
}


@dataclass(frozen=True, slots=True)
class AttemptPolicy:
    """The limits of attempts.

    `limit` is the number of processes that may end during the same work before the worker stops retrying this work.
    `hang_seconds`: if a call has run for this long before the worker receives the stop signal, the call counts as the
    reason for the stop.
    """

    limit: int = 3
    hang_seconds: float = 600.0


Verdict = Literal["run", "fail", "quarantine"]


def verdict(
    work: InFlightWork, kind: worker_pb2.OperationKind.ValueType | None, interruptions: int, limit: int
) -> Verdict:
    """Return the decision about the work.

    Work without a published result fails, except a release. All other work waits. A release waits because its failure
    would lose the last weights of a model. If the work is an operation, `kind` is the kind of the operation, otherwise
    None.
    """
    if interruptions < limit:
        return "run"
    fails = work.purpose == "import" or (work.purpose == "operation" and kind != worker_pb2.RELEASE_MODEL)
    return "fail" if fails else "quarantine"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The decision not to attempt some work again.

    The work fails with the message, or the model of the work waits for another process.
    """

    fails: bool
    message: str


class Attempts:
    """The work during which processes have ended, with the number of these processes.

    Only the engine's thread uses this object, except for `forget_all`.
    """

    def __init__(self, journal: Journal, marker: InFlightMarker, limit: int) -> None:
        self._journal = journal
        self._marker = marker
        self._limit = limit
        self._known: dict[InFlightWork, tuple[int, str]] = {}
        self.before_a_suspect: list[Callable[[], None]] = []
        """Functions that wait until nothing runs in other threads.

        If the process ends after this wait, only the suspected work can be the cause.
        """

    def recover(self) -> None:
        """Count the end of the previous process, and read the counts in the journal.

        After JournalFull, `recover` may be called again.
        """
        left = self._marker.left_behind
        if left is not None:
            self._journal.write(lambda db: result_tables.count_interruption(db, left), uses_reserve=True).result()
            self._marker.clear()
        self._known = self._journal.read(result_tables.read_interruptions).result()
        for work in left.suspects if left is not None else ():
            self._log(work)

    def _log(self, work: InFlightWork) -> None:
        count, sign = self._known[work]
        log.warning(
            "the last process ended while the engine worked",
            **{"purpose": work.purpose, "model_id": work.model_id, "seq_id": work.seq_id},
            **{"times": count, "limit": self._limit, "last_sign": sign or SILENT},
        )

    def refusal(self, work: InFlightWork, operation: Operation | None = None) -> Refusal | None:
        """Return the reason why the work may not begin, or None if the work may begin.

        Call this before the work begins.
        """
        if self.is_suspect(work):
            for wait in self.before_a_suspect:
                wait()
        count, _ = self._known.get(work, (0, ""))
        decision = verdict(work, operation.kind if operation else None, count, self._limit)
        return None if decision == "run" else Refusal(decision == "fail", self._message(work, operation, decision))

    def is_suspect(self, work: InFlightWork) -> bool:
        """Return whether a process has ended during the work, or during a call that included the work.

        Suspected work runs alone. If the process ends again, the suspected work is known to be the cause.
        """
        return work in self._known

    def succeeded(self, work: InFlightWork) -> None:
        """Forget the interruptions of work that has no result in the journal.

        The interruptions of an operation are forgotten when the operation's result is recorded.
        """
        if self._known.pop(work, None) is not None:
            self._journal.write(lambda db: result_tables.forget_interruptions(db, work), must_succeed=True)

    def forget_all(self) -> None:
        """Forget all counts after an orderly stop. An administrator may have added memory or changed the node."""
        self._known = {}
        self._journal.write(result_tables.forget_all_interruptions, must_succeed=True)

    # ---- messages

    def _message(self, work: InFlightWork, operation: Operation | None, decision: Verdict) -> str:
        if work.purpose == "import":
            return self._import_refusal(work)
        if work.purpose == "snapshot":
            return self._snapshot_refusal(work)
        if decision == "fail" and operation is not None:
            return self._failure_message(work, operation)
        return self._quarantine_reason(work, operation)

    def _failure_message(self, work: InFlightWork, operation: Operation) -> str:
        advice = ADVICE.get(operation.kind, "Give the worker more memory, then send it again.")
        return (
            f"{_name(operation)} was given up: {self._what_happened(work)} while it ran. "
            f"It was not applied; later operations continue. {advice}"
        )

    def _import_refusal(self, work: InFlightWork) -> str:
        return (
            f"The adapter of {work.model_id} was given up: {self._what_happened(work)} while its files were "
            "read. Upload one of a lower rank or of fewer modules, or have the worker's memory increased."
        )

    def _quarantine_reason(self, work: InFlightWork, operation: Operation | None) -> str:
        cause = f"{self._what_happened(work)} while {_attempt(work, operation)}"
        return (
            f"{work.model_id} waits: {cause}. Nothing is lost: the model continues when the worker is "
            "restarted, with more memory if that is the cause. Other models continue."
        )

    def _snapshot_refusal(self, work: InFlightWork) -> str:
        return (
            f"No snapshot of {work.model_id} is taken: {self._what_happened(work)} while one was taken. Its operations "
            "stay in the journal. Give the worker more memory."
        )

    def _what_happened(self, work: InFlightWork) -> str:
        # Another thread may forget the count at any time, at an orderly stop.
        count, sign = self._known.get(work, (self._limit, ""))
        times = "once" if count == 1 else f"{count} times"
        return f"the worker's process ended {times} (the last sign: {sign or SILENT})"


def reason_to_wait(
    work: InFlightWork, operation: Operation | None, error: Exception, again_after_seconds: float | None = None
) -> str:
    """Return the reason why a model waits: this worker cannot restore or replay the model now.

    The model's data is intact. Clients see the reason.
    """
    remedy = "the model continues when the cause is fixed and the worker is restarted"
    if again_after_seconds is not None:
        remedy = f"the worker retries every {again_after_seconds:.0f} s"
    return (
        f"{work.model_id} waits because of an error while {_attempt(work, operation)}: "
        f"{str(error).rstrip('.') or type(error).__name__}. Nothing is lost: {remedy}. Other models continue."
    )


def _attempt(work: InFlightWork, operation: Operation | None) -> str:
    return {
        "operation": f"{_name(operation)} ran" if operation else "",
        "replay": f"{_name(operation)} ran again after a restart" if operation else "",
        "restore": f"its snapshot of operation {work.seq_id} was loaded",
    }[work.purpose]


def _name(operation: Operation) -> str:
    kind = worker_pb2.OperationKind.Name(operation.kind).lower()
    return kind if operation.kind == worker_pb2.RELEASE_MODEL else f"{kind} {operation.seq_id}"
