"""Whose turn it is to restart for what nobody asked: at most so many sessions at the same time as the policy says.

A session has its turn from when it gets it until it serves again with what it restarted for. One that does not come
back keeps it, so that what broke one worker does not go on to break the others. Turns are also in the sessions' status:
who leads next reads there who has begun.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.conditions import ConditionType
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.resources import SESSIONS, Key
from tinsmith_operator.logs import get_logger
from tinsmith_operator.restarts import RestartPolicy

log = get_logger(__name__)


class Turns:
    """enqueue: hears of who has just got one."""

    def __init__(
        self, policy: RestartPolicy, cache: Cache, enqueue: Callable[[Key], None], clock: Callable[[], datetime]
    ) -> None:
        self._policy = policy
        self._cache = cache
        self._enqueue = enqueue
        self._clock = clock
        self._taken: set[Key] | None = None
        self._waiting: dict[Key, None] = {}

    def has(self, key: Key) -> bool:
        return key in self._holders()

    def note(self, key: Key, *, wants: bool) -> None:
        """What was just decided about this one."""
        holders = self._holders()
        if not wants:
            self._waiting.pop(key, None)
            holders.discard(key)
        elif key not in holders:
            self._waiting.setdefault(key)
        self._pass_on()

    def forget(self, key: Key) -> None:
        """It is gone."""
        self.note(key, wants=False)

    def end(self) -> None:
        """Somebody else gives them now."""
        self._taken = None
        self._waiting.clear()

    def _pass_on(self) -> None:
        while self._waiting and self._policy.is_open(self._clock()):
            holders = self._holders()
            if len(holders) >= self._policy.most(self._running()):
                return
            key = next(iter(self._waiting))
            del self._waiting[key]
            holders.add(key)
            log.info("turn to restart", turn_of=f"{key.namespace}/{key.name}", turns=len(holders))
            self._enqueue(key)

    def _holders(self) -> set[Key]:
        """At first those of whoever led before."""
        if self._taken is None:
            self._taken = {_key(session) for session in self._cache.of_kind(SESSIONS.kind) if _says_so(session)}
        return self._taken

    def _running(self) -> int:
        return sum(not session["spec"].get("suspend") for session in self._cache.of_kind(SESSIONS.kind))


def _says_so(session: Manifest) -> bool:
    conditions = (session.get("status") or {}).get("conditions") or ()
    said = {each["type"]: each["reason"] for each in conditions}
    return said.get(ConditionType.UPGRADE_AVAILABLE) == Reason.TAKING_ITS_TURN


def _key(session: Manifest) -> Key:
    metadata = session["metadata"]
    return Key(metadata["namespace"], metadata["name"], session["kind"])
