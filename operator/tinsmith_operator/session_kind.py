"""TrainingSessions: what a decision about one is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tinsmith_operator.act import Actor
from tinsmith_operator.cache import Cache
from tinsmith_operator.decide.actions import Decision
from tinsmith_operator.decide.decision import decide
from tinsmith_operator.decide.observed import KubernetesWarning, Observed
from tinsmith_operator.decide.requests import snapshot_request
from tinsmith_operator.events import Events
from tinsmith_operator.installation import Installation
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.names import WORKER_CONTAINER, endpoint
from tinsmith_operator.model.session import TrainingSession, parse_session
from tinsmith_operator.observe import observe_session
from tinsmith_operator.ray_clusters import RayClusters
from tinsmith_operator.resources import Key
from tinsmith_operator.snapshots import Snapshots
from tinsmith_operator.trust import Trust
from tinsmith_operator.workers import Target, Workers


@dataclass(frozen=True)
class SessionKind:
    cache: Cache
    actor: Actor
    events: Events
    workers: Workers
    snapshots: Snapshots
    trust: Trust
    installation: Installation
    ray_clusters: RayClusters
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    async def decide(self, key: Key, body: Manifest) -> tuple[TrainingSession, Decision]:
        session = parse_session(body)
        if not self._is_seen(session):
            return session, Decision(())
        observed = await self._observe(key, session)
        return session, decide(observed, self.installation, self.clock())

    def _is_seen(self, session: TrainingSession) -> bool:
        """Whether what keeps its pods is known, or why it cannot be; when it is, the session is looked at again."""
        if not session.spec.is_group:
            return True
        self.ray_clusters.want()
        return self.ray_clusters.knows(session.namespace) or self.ray_clusters.problem(session.namespace) is not None

    def forget(self, key: Key) -> None:
        self.workers.forget(key)
        self.snapshots.forget(key)

    async def _observe(self, key: Key, session: TrainingSession) -> Observed:
        children = observe_session(self.cache, key, session, self.trust.known_fingerprint)
        # A session that is being deleted waits until its worker says that it holds no adapter.
        worker = worker_of(children)
        self.workers.follow(key, worker, closely=session.is_being_deleted)
        self.snapshots.want(key, worker, snapshot_request(session))
        return replace(
            children,
            report=self.workers.report(key),
            snapshot=self.snapshots.answer(key),
            warnings=await self._warnings(children),
            refusals=self.actor.refusals(key),
            trust_problem=self.trust.problem,
            no_groups=self.ray_clusters.problem(session.namespace) if session.spec.is_group else None,
        )

    async def _warnings(self, observed: Observed) -> tuple[KubernetesWarning, ...]:
        """Only while they could explain something: a session at rest costs no request."""
        ready = observed.session.status.condition("Ready")
        at_rest = observed.session.spec.suspend or (ready is not None and ready.status == "True")
        nothing_is_made = observed.workload is None and observed.conversion is None
        return () if at_rest or nothing_is_made else await self.events.warnings(observed.session)


def worker_of(observed: Observed) -> Target | None:
    """Whom to ask: the worker of the session's pod, once it has started."""
    session, pod, claim = observed.session, observed.pod, observed.claim
    if pod is None or claim is None or not _has_started(pod):
        return None
    address = endpoint(session.name, session.namespace)
    return Target(pod["metadata"]["uid"], address, claim["metadata"]["uid"])


def _has_started(pod: Manifest) -> bool:
    """Not "is ready": a worker that hangs is not ready, and is asked all the same."""
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    return any(container["name"] == WORKER_CONTAINER and container.get("started") for container in containers)
