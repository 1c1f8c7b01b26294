"""The turns of automatic restarts. The policy limits how many sessions restart at the same time.

A session's turn ends when the session serves again with the new image or settings. A session that does not serve again
keeps its turn. So a change that broke one worker does not break the other workers. The session's status also records
the turn, so that the next leader knows which sessions have a turn.
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
    """The sessions that have a turn or wait for a turn. `enqueue` is called for each session that gets a turn."""

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
        """Record whether the session wants a turn now."""
        holders = self._holders()
        if not wants:
            self._waiting.pop(key, None)
            holders.discard(key)
        elif key not in holders:
            self._waiting.setdefault(key)
        self._pass_on()

    def forget(self, key: Key) -> None:
        """Free the turn of a session that does not exist any more."""
        self.note(key, wants=False)

    def end(self) -> None:
        """Forget all turns, because another operator is leading now."""
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
            log.info("automatic restart", turn_of=f"{key.namespace}/{key.name}", turns=len(holders))
            self._enqueue(key)

    def _holders(self) -> set[Key]:
        """Return the sessions that have a turn.

        A new leader starts with the sessions to which the previous leader gave turns.
        """
        if self._taken is None:
            self._taken = {_key(session) for session in self._cache.of_kind(SESSIONS.kind) if _has_turn(session)}
        return self._taken

    def _running(self) -> int:
        return sum(not _is_suspended(session) for session in self._cache.of_kind(SESSIONS.kind))


def _is_suspended(session: Manifest) -> bool:
    idle = (session.get("status") or {}).get("idle") or {}
    return bool(session["spec"].get("suspend")) or "suspendedTime" in idle


def _has_turn(session: Manifest) -> bool:
    conditions = (session.get("status") or {}).get("conditions") or ()
    reasons = {each["type"]: each["reason"] for each in conditions}
    return reasons.get(ConditionType.UPGRADE_AVAILABLE) == Reason.TAKING_ITS_TURN


def _key(session: Manifest) -> Key:
    metadata = session["metadata"]
    return Key(metadata["namespace"], metadata["name"], session["kind"])
