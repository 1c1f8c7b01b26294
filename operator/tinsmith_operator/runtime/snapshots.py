"""Snapshots that somebody asked for: each request goes to its session's worker until that has answered it.

Answers live in memory until the status says that the request is done with. An operator that takes over before that asks
once more, which costs nothing: a worker writes only what has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tinsmith_operator.common.observed import SnapshotAnswer
from tinsmith_operator.errors import OperatorError
from tinsmith_operator.kube.resources import Key
from tinsmith_operator.logs import get_logger, outside_of_reconciles
from tinsmith_operator.runtime.worker_client import CannotSnapshot, Silent, TakeSnapshot, Target

RETRY_SECONDS = 5.0

log = get_logger(__name__)


class Snapshots:
    """While this operator leads. `heard` is called with whose request has been answered."""

    def __init__(
        self, take: TakeSnapshot, heard: Callable[[Key], None], leads: Callable[[], bool] = lambda: True
    ) -> None:
        self._take = take
        self._heard = heard
        self._leads = leads
        self._wanted: dict[Key, tuple[Target, str]] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._answers: dict[Key, SnapshotAnswer] = {}

    def want(self, key: Key, target: Target | None, request: str | None) -> None:
        """From now on this worker is asked for it. The same again changes nothing; None ends what was asked before."""
        wanted = (target, request) if target is not None and request is not None and self._leads() else None
        if self._wanted.get(key) == wanted:
            return
        self._stop(key)
        if wanted is not None:
            self._wanted[key] = wanted
            self._tasks[key] = asyncio.create_task(
                self._ask(key, *wanted), name=f"snapshot {key.name}", context=outside_of_reconciles()
            )

    def answer(self, key: Key) -> SnapshotAnswer | None:
        """The latest."""
        return self._answers.get(key)

    def forget(self, key: Key) -> None:
        self._stop(key)
        self._answers.pop(key, None)

    def end(self) -> None:
        """Somebody else asks now. A worker that has been asked writes its snapshot all the same."""
        for key in list(self._wanted):
            self._stop(key)
        self._answers.clear()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self.end()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self, key: Key) -> None:
        self._wanted.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def _ask(self, key: Key, target: Target, request: str) -> None:
        while (answer := await self._attempt(key, target, request)) is None:
            await asyncio.sleep(RETRY_SECONDS)
        log.info(
            "snapshot answered",
            namespace=key.namespace,
            kind=key.kind,
            name=key.name,
            request=request,
            problem=answer.problem,
        )
        self._answers[key] = answer
        self._heard(key)

    async def _attempt(self, key: Key, target: Target, request: str) -> SnapshotAnswer | None:
        try:
            return SnapshotAnswer(request, await self._take(target))
        except CannotSnapshot as error:
            return SnapshotAnswer(request, None, str(error))
        except (Silent, OperatorError) as error:
            log.info(
                "no snapshot yet",
                namespace=key.namespace,
                kind=key.kind,
                name=key.name,
                address=target.address,
                error=str(error),
            )
        except Exception:
            # Nobody waits for this task: were it to end, the request would seem to be under way for ever.
            log.exception("snapshot not asked for", **key._asdict(), address=target.address)
        return None
