"""One reconcile: read what is there, decide, act. What differs between sessions and pools is in their kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import RESTART_REQUEST_ANNOTATION, SNAPSHOT_REQUEST_ANNOTATION
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.common.actions import Decision
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.resources import Key, Ref
from tinsmith_operator.runtime.actor import Actor


class Kind(Protocol):
    """How one kind of owner is read, observed and decided about."""

    async def decide(self, key: Key, body: Manifest) -> tuple[Owner, Decision]:
        """What is to be done about it now. Raises Unreadable and ClusterError."""
        ...

    def carried_out(self, key: Key, decision: Decision) -> None:
        """What was decided about it is done, and its status says so."""
        ...

    def forget(self, key: Key) -> None:
        """It is gone."""
        ...


@dataclass(frozen=True)
class ReconcileResult:
    """acted: something was done, so look again. requeue_after_seconds: look again by then in any case."""

    acted: bool
    requeue_after_seconds: float | None = None


@dataclass(frozen=True)
class Reconciler:
    """One of a key at a time. kinds: by the kind of a key."""

    cache: Cache
    actor: Actor
    kinds: Mapping[str, Kind]

    def asked(self, key: Key) -> object:
        """What its user wants of it, to be compared with what was wanted before: a change of the spec moves the
        generation. None when it is gone.
        """
        body = self.cache.peek(Ref(key.kind, key.namespace, key.name))
        if body is None:
            return None
        metadata = body["metadata"]
        annotations = metadata.get("annotations") or {}
        requests = (annotations.get(RESTART_REQUEST_ANNOTATION), annotations.get(SNAPSHOT_REQUEST_ANNOTATION))
        return metadata["uid"], metadata.get("generation"), metadata.get("deletionTimestamp"), requests

    def identify(self, key: Key) -> dict[str, object]:
        """Which object it is now, for the log; nothing when it is gone."""
        body = self.cache.peek(Ref(key.kind, key.namespace, key.name))
        said = body["metadata"] if body is not None else {}
        return {name: said[name] for name in ("uid", "generation") if name in said}

    async def reconcile(self, key: Key) -> ReconcileResult:
        """Raises ClusterError, NotLeading and Unreadable."""
        kind = self.kinds[key.kind]
        body = self.cache.peek(Ref(key.kind, key.namespace, key.name))
        if body is None:
            self.cache.forget_reader(key)
            self.actor.forget(key)
            kind.forget(key)
            return ReconcileResult(acted=False)
        owner, decision = await kind.decide(key, body)
        await self.actor.act(owner, decision.actions)
        kind.carried_out(key, decision)
        return ReconcileResult(bool(decision.actions), decision.requeue_after_seconds)
