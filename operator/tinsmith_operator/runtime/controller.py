"""The controller, which reconciles keys of the work queue, several at a time.

After a reconcile, the controller requeues the key immediately, later, or with a backoff.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tinsmith_operator.api.owner import Unreadable
from tinsmith_operator.errors import AlreadyExists, Conflict, NotFound, NotLeading, OperatorError, Refused, Unavailable
from tinsmith_operator.kube.resources import Key
from tinsmith_operator.logs import get_logger, in_reconcile
from tinsmith_operator.metrics import Metrics
from tinsmith_operator.runtime.reconcile import ReconcileResult
from tinsmith_operator.runtime.workqueue import Precedence, WorkQueue

# A new session needs about ten rounds until its worker runs. A session with more rounds in a row does not converge, and
# must not keep the API server busy.
ROUNDS_AT_ONCE = 20
NOT_LEADING_SECONDS = 1.0

Reconcile = Callable[[Key], Awaitable[ReconcileResult]]

RequestedState = Callable[[Key], object]
"""A function that returns what the user requests of a session or pool.

The controller compares the result with an earlier result of the function.
"""

Identify = Callable[[Key], dict[str, object]]
"""A function that returns further fields that log lines contain for a session or pool."""

log = get_logger(__name__)


@dataclass
class Rounds:
    """The number of consecutive reconciles in which the operator acted on a key without a new request of the user."""

    requested_state: object
    count: int = 0


class Controller:
    """A controller that reconciles keys while `acts` is set."""

    def __init__(
        self,
        queue: WorkQueue[Key],
        reconcile: Reconcile,
        requested_state: RequestedState,
        metrics: Metrics,
        acts: asyncio.Event,
        identify: Identify = lambda _key: {},
        precedence: Callable[[Key], Precedence] = lambda _key: Precedence.ORDINARY,
    ) -> None:
        self._queue = queue
        self._reconcile = reconcile
        self._requested_state = requested_state
        self._metrics = metrics
        self._acts = acts
        self._identify = identify
        self._precedence = precedence
        self._rounds: dict[Key, Rounds] = {}

    def enqueue(self, key: Key) -> None:
        """Reconcile the key as soon as possible.

        A key that does not converge keeps its backoff until the user requests a change of the session or pool. Events
        without a new request do not end the backoff, because most events come from the operator's own writes.
        """
        rounds = self._rounds.get(key)
        if rounds is not None and rounds.requested_state != self._requested_state(key):
            del self._rounds[key]
            self._queue.settle(key)
            self._queue.release(key)
        self._queue.add(key, self._precedence(key))

    async def resync(self, keys: Callable[[], Sequence[Key]], seconds: float) -> None:
        """Enqueue each key once in a period of this many seconds, until cancelled.

        The keys are spread over the period. Five thousand at once would delay events by 12 s.
        """
        while True:
            known = keys()
            for key in known:
                await asyncio.sleep(seconds / len(known))
                self.enqueue(key)
            if not known:
                await asyncio.sleep(seconds)

    async def run(self) -> None:
        """Reconcile keys until cancelled.

        Several tasks run this method at the same time, but two tasks never reconcile the same key at the same time.
        """
        while True:
            await self._acts.wait()
            key = await self._queue.take()
            try:
                if self._acts.is_set():
                    await self._work(key)
                else:
                    self._queue.add(key)
            finally:
                self._queue.done(key)
            # A reconcile without actions never yields to the event loop. Many in a row must not delay the renewal of
            # the Lease.
            await asyncio.sleep(0)

    async def _work(self, key: Key) -> None:
        began = asyncio.get_running_loop().time()
        with in_reconcile(key.namespace, key.kind, key.name, **self._identify(key)):
            result = await self._attempt(key)
        self._metrics.note_reconcile(result, asyncio.get_running_loop().time() - began)

    async def _attempt(self, key: Key) -> str:
        """Reconcile the key. Return the name of the result in the metrics."""
        try:
            return self._settle(key, await self._reconcile(key))
        except NotLeading:
            # The next leader reconciles all keys. But after a slow renewal, this operator continues without a new term.
            self._queue.add_after(key, NOT_LEADING_SECONDS)
            return "not_leading"
        except Unreadable as error:
            log.error("not readable", error=str(error))
            return "unreadable"
        except OperatorError as error:
            self._put_back(key, error)
            return result_of(error)
        except Exception as error:
            log.exception("reconcile failed")
            self._put_back(key, error)
            return "error"

    def _put_back(self, key: Key, error: Exception, *, hold: bool = False) -> None:
        requested_seconds = error.retry_after_seconds if isinstance(error, Unavailable) else None
        seconds = self._queue.hold(key) if hold else self._queue.retry(key, requested_seconds or 0.0)
        self._metrics.note_retry()
        log.info("put back", seconds=round(seconds, 2), error=str(error))

    def _settle(self, key: Key, outcome: ReconcileResult) -> str:
        if not outcome.acted:
            self._rounds.pop(key, None)
            self._queue.settle(key)
        elif self._count(key) <= ROUNDS_AT_ONCE:
            self._queue.add(key, self._precedence(key))
        else:
            error = RuntimeError("many rounds of actions have not brought it to its desired state")
            self._put_back(key, error, hold=True)
        if outcome.requeue_after_seconds is not None:
            self._queue.add_after(key, outcome.requeue_after_seconds, self._precedence(key))
        return "acted" if outcome.acted else "settled"

    def _count(self, key: Key) -> int:
        """Add one to the number of consecutive rounds for the key, and return the number."""
        rounds = self._rounds.setdefault(key, Rounds(self._requested_state(key)))
        rounds.count += 1
        return rounds.count


def result_of(error: OperatorError) -> str:
    """Return the name of the error in the metrics.

    A conflict is not counted as a failure, because a conflict only means that another writer was faster.
    """
    match error:
        case Conflict() | AlreadyExists() | NotFound():
            return "conflict"
        case Refused():
            return "refused"
        case Unavailable():
            return "unavailable"
        case _:
            return "error"
