"""The reconcile of a session or pool: observe, decide, act."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Protocol

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import (
    PAUSED_ANNOTATION,
    POOL_KIND,
    RESTART_REQUEST_ANNOTATION,
    RPC_PORT,
    SESSION_KIND,
    SKIP_FINALIZER_ANNOTATION,
    SNAPSHOT_REQUEST_ANNOTATION,
    WORKER_CONTAINER,
    endpoint,
    pod_name,
    pool_workload_name,
)
from tinsmith_operator.api.owner import Reconciled, wake_request_of
from tinsmith_operator.api.sampler_pool import SamplerPool, parse_pool
from tinsmith_operator.api.session_template import SessionTemplate, parse_template
from tinsmith_operator.api.training_session import PendingSession, TrainingSession, parse_pending, parse_session
from tinsmith_operator.ca.issuer import Issuer
from tinsmith_operator.common.actions import Decision
from tinsmith_operator.common.idleness import is_due, must_stop, report_period_seconds
from tinsmith_operator.common.observed import KubernetesWarning, Observed, ObservedPool, WorkerReport
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.common.requests import retired_at, snapshot_request
from tinsmith_operator.common.workloads import Workload
from tinsmith_operator.installation import Installation
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.events import Events
from tinsmith_operator.kube.resources import DEPLOYMENTS, PODS, RAY_CLUSTERS, SERVICES, WORKLOADS, Key, Ref
from tinsmith_operator.pool.decision import decide_pool
from tinsmith_operator.pool.situation import read_rollout
from tinsmith_operator.runtime.actor import Actor
from tinsmith_operator.runtime.image_digests import ImageDigests
from tinsmith_operator.runtime.observe import observe_pool, observe_session, observe_template, template_of
from tinsmith_operator.runtime.progress import ProgressWriter
from tinsmith_operator.runtime.ray_cluster_informer import RayClusterInformer
from tinsmith_operator.runtime.turns import Turns
from tinsmith_operator.runtime.worker_client import Reports, Snapshots, Target
from tinsmith_operator.runtime.workqueue import Precedence
from tinsmith_operator.session.decision import decide
from tinsmith_operator.session.template import decide_pending, exempted
from tinsmith_operator.template.decision import decide_template

USERS_ANNOTATIONS = (
    RESTART_REQUEST_ANNOTATION,
    SNAPSHOT_REQUEST_ANNOTATION,
    PAUSED_ANNOTATION,
    SKIP_FINALIZER_ANNOTATION,
)
"""The annotations by which users change the state that they request. A wake request is read separately."""

POD_OWNERS = (WORKLOADS.kind, RAY_CLUSTERS.kind, DEPLOYMENTS.kind)
"""The kinds of the last objects that are created for a session or pool."""


class Kind(Protocol):
    """The functions that differ between sessions and pools in a reconcile."""

    async def decide(self, key: Key, body: Manifest) -> tuple[Reconciled, Decision]:
        """Return the owner, and the decision about the owner. Raises Unreadable and ClusterError."""
        ...

    def carried_out(self, key: Key, decision: Decision) -> None:
        """Record that the actions of the decision are done."""
        ...

    def forget(self, key: Key) -> None:
        """Forget an owner that is gone."""
        ...


@dataclass(frozen=True)
class ReconcileResult:
    """The result of a reconcile.

    - `acted`: the operator carried out actions; the key is then reconciled again.
    - `requeue_after_seconds`: the longest time until the next reconcile.
    """

    acted: bool
    requeue_after_seconds: float | None = None


@dataclass(frozen=True)
class Reconciler:
    """A component that reconciles one key at a time. `kinds` contains the functions for each kind of key."""

    cache: Cache
    actor: Actor
    kinds: Mapping[str, Kind]

    def requested_state(self, key: Key) -> object:
        """Return the state that the user requests, or None if the owner is gone.

        The controller compares the returned state with an earlier state.

        The returned state contains the generation, which changes with each change of the spec.
        """
        body = self.cache.peek(Ref(key.kind, key.namespace, key.name))
        if body is None:
            return None
        metadata = body["metadata"]
        annotations = metadata.get("annotations") or {}
        by_annotation = (annotations.get(name) for name in USERS_ANNOTATIONS)
        requests = (*by_annotation, wake_request_of(body))
        return metadata["uid"], metadata.get("generation"), metadata.get("deletionTimestamp"), requests

    def precedence(self, key: Key) -> Precedence:
        """Return how urgent the key is. Only a session or pool that has no status yet may wait behind others."""
        body = self.cache.peek(Ref(key.kind, key.namespace, key.name))
        if body is None or key.kind not in (SESSION_KIND, POOL_KIND) or (body.get("status") or {}).get("conditions"):
            return Precedence.ORDINARY
        name = pool_workload_name(key.name) if key.kind == POOL_KIND else key.name
        workloads = (self.cache.peek(Ref(kind, key.namespace, name)) for kind in POD_OWNERS)
        if (workload := next((each for each in workloads if each is not None), None)) is not None:
            is_ready = bool((workload.get("status") or {}).get("readyReplicas")) or self._has_ready_pod(key)
            return Precedence.FIRST_STATUS if is_ready else Precedence.STARTING
        has_begun = self.cache.peek(Ref(SERVICES.kind, key.namespace, name)) is not None
        return Precedence.ORDINARY if has_begun else Precedence.NEW

    def _has_ready_pod(self, key: Key) -> bool:
        """Return whether the session's pod is ready. The StatefulSet reports this a moment later."""
        pod = self.cache.peek(Ref(PODS.kind, key.namespace, pod_name(key.name)))
        return pod is not None and Pod(pod).is_ready

    def identify(self, key: Key) -> dict[str, object]:
        """Return the UID and the generation of the object, for the log."""
        body = self.cache.peek(Ref(key.kind, key.namespace, key.name))
        metadata = body["metadata"] if body is not None else {}
        return {name: metadata[name] for name in ("uid", "generation") if name in metadata}

    async def reconcile(self, key: Key) -> ReconcileResult:
        """Reconcile the key. Raises ClusterError, NotLeading and Unreadable."""
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


@dataclass(frozen=True)
class SessionKind:
    cache: Cache
    actor: Actor
    events: Events
    reports: Reports
    snapshots: Snapshots
    issuer: Issuer
    installation: Installation
    ray_clusters: RayClusterInformer
    turns: Turns
    image_digests: ImageDigests
    progress: ProgressWriter
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    async def decide(self, key: Key, body: Manifest) -> tuple[TrainingSession | PendingSession, Decision]:
        self.cache.forget_reader(key)
        pending = parse_pending(body)
        if pending is not None:
            template = template_of(self.cache, key, pending.template_name)
            return pending, decide_pending(pending, template, self.clock())
        session = self._exempted(key, parse_session(body))
        if not self._is_seen(session):
            return session, Decision(())
        observed = await self._observe(key, session)
        return session, decide(observed, self.installation, self.clock())

    def _exempted(self, key: Key, session: TrainingSession) -> TrainingSession:
        """Return the session, without its idle policy while its template keeps it warm."""
        copy = session.status.template
        return exempted(session, template_of(self.cache, key, copy.name)) if copy is not None else session

    def carried_out(self, key: Key, decision: Decision) -> None:
        # Change the turns only after the status is written. Otherwise the statuses of two sessions could both name the
        # turn.
        if decision.wants_turn is not None:
            self.turns.note(key, wants=decision.wants_turn)

    def _is_seen(self, session: TrainingSession) -> bool:
        """Return whether RayClusters are listed, or are known to be unlistable.

        When the state of RayClusters becomes known, the session is reconciled again.
        """
        if not session.spec.is_group:
            return True
        self.ray_clusters.enable()
        return self.ray_clusters.knows(session.namespace) or self.ray_clusters.problem(session.namespace) is not None

    def forget(self, key: Key) -> None:
        self.reports.forget(key)
        self.snapshots.forget(key)
        self.turns.forget(key)
        self.image_digests.forget(key)
        self.progress.forget(key)

    async def _observe(self, key: Key, session: TrainingSession) -> Observed:
        children = observe_session(self.cache, key, session, self.issuer.known_fingerprint)
        if children.pod is not None:
            self.image_digests.note(children.pod)
        else:
            self.image_digests.forget(key)
        # A deleted or retired session waits until its worker reports that it holds no adapter.
        worker = worker_of(children)
        if worker is None:
            self.progress.note_stopped(key)
        period_seconds = report_period_seconds(session)
        closely = session.is_being_deleted or retired_at(session) is not None
        self.reports.follow(key, worker, closely=closely, at_most_seconds=period_seconds)
        self.snapshots.request(key, worker, snapshot_request(session))
        return replace(
            children,
            report=self.reports.answer(key),
            snapshot=self.snapshots.answer(key),
            warnings=await self._warnings(children),
            refusals=self.actor.refusals(key),
            stored=self.actor.stored(key),
            ca_problem=self.issuer.problem,
            default_image_digest=self.image_digests.known(key.namespace, self.installation.trainer_image),
            has_turn=self.turns.has(key),
            no_groups=self.ray_clusters.problem(session.namespace) if session.spec.is_group else None,
        )

    async def _warnings(self, observed: Observed) -> tuple[KubernetesWarning, ...]:
        """Return the warnings if the session or pool has a problem that a warning could explain.

        For a session without a problem, no request is sent.
        """
        ready = observed.session.status.condition("Ready")
        is_ready = ready is not None and ready.status == "True" and observed.image_pull is None
        at_rest = observed.session.spec.suspend or is_ready or must_stop(observed.session, self.clock())
        nothing_is_made = observed.workload is None and observed.conversion is None
        return () if at_rest or nothing_is_made else await self.events.warnings(observed.session)


def worker_of(observed: Observed) -> Target | None:
    """Return the worker in the session's pod, if the pod's container has started."""
    session, pod, claim = observed.session, observed.pod, observed.claim
    if pod is None or claim is None or not _has_started(pod):
        return None
    address = endpoint(session.name, session.namespace)
    return Target(pod["metadata"]["uid"], address, claim["metadata"]["uid"])


def _has_started(pod: Manifest) -> bool:
    """Return whether the container has started.

    A worker that hangs is not ready, but the operator still calls the worker.
    """
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    return any(container["name"] == WORKER_CONTAINER and container.get("started") for container in containers)


def replica_of(pool: SamplerPool, pod: Manifest) -> Target | None:
    """Return the sampler in a ready pod of a pool with an idle policy, at the pod's own address."""
    status = pod.get("status") or {}
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions") or ())
    address = status.get("podIP")
    if pool.spec.idle is None or not ready or not address:
        return None
    return Target(
        pod["metadata"]["uid"], f"[{address}]:{RPC_PORT}" if ":" in address else f"{address}:{RPC_PORT}", pool.uid
    )


def replica_key(pool: Key, pod: Manifest) -> Key:
    """Return a key for a replica's reports. No object has a name with a slash."""
    return pool._replace(name=f"{pool.name}/{pod['metadata']['name']}")


def pool_of_replica(replica: Key) -> Key:
    """Return the key of the pool with this replica."""
    return replica._replace(name=replica.name.partition("/")[0])


@dataclass(frozen=True)
class PoolKind:
    cache: Cache
    actor: Actor
    events: Events
    reports: Reports
    issuer: Issuer
    installation: Installation
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    followed: dict[Key, frozenset[Key]] = field(default_factory=dict)

    async def decide(self, key: Key, body: Manifest) -> tuple[SamplerPool, Decision]:
        pool = parse_pool(body)
        children = observe_pool(self.cache, key, pool, self.issuer.known_fingerprint)
        observed = replace(
            children,
            reports=self._follow(key, children),
            warnings=await self._warnings(children),
            refusals=self.actor.refusals(key),
            stored=self.actor.stored(key),
            ca_problem=self.issuer.problem,
        )
        return pool, decide_pool(observed, self.installation, self.clock())

    def carried_out(self, key: Key, decision: Decision) -> None:
        """Do nothing, because the operator keeps no state for pools."""

    def forget(self, key: Key) -> None:
        for replica in self.followed.pop(key, frozenset()):
            self.reports.forget(replica)

    def _follow(self, key: Key, observed: ObservedPool) -> Mapping[str, WorkerReport]:
        """Call the ready pods of a pool with an idle policy, and return their latest reports by the pods' UIDs.

        A pool is suspended only while all its pods have just reported that no client uses them.
        """
        pool, now = observed.pool, self.clock()
        targets = {replica_key(key, pod): target for pod in observed.pods if (target := replica_of(pool, pod))}
        for gone in self.followed.get(key, frozenset()) - targets.keys():
            self.reports.forget(gone)
        self.followed[key] = frozenset(targets)
        closely, period_seconds = is_due(pool, now) and not pool.is_paused, report_period_seconds(pool)
        for replica, target in targets.items():
            self.reports.follow(replica, target, closely=closely, at_most_seconds=period_seconds)
        answers = (self.reports.answer(replica) for replica in targets)
        return {answer.pod_uid: answer for answer in answers if answer is not None}

    async def _warnings(self, observed: ObservedPool) -> tuple[KubernetesWarning, ...]:
        """Return the warnings if the session or pool has a problem that a warning could explain.

        For a pool without a problem, no request is sent.
        """
        replicas, deployment = observed.pool.spec.replicas, observed.workload
        if must_stop(observed.pool, self.clock()):
            return ()
        at_rest = deployment is None or replicas == 0 or read_rollout(Workload(deployment)).is_done(replicas)
        return () if at_rest else await self.events.warnings(observed.pool)


@dataclass(frozen=True)
class TemplateKind:
    cache: Cache
    actor: Actor
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    async def decide(self, key: Key, body: Manifest) -> tuple[SessionTemplate, Decision]:
        template = parse_template(body)
        observed = observe_template(self.cache, key, template, self.actor.refusals(key))
        return template, decide_template(observed, self.clock())

    def carried_out(self, key: Key, decision: Decision) -> None:
        """Do nothing, because the operator keeps no state for templates."""

    def forget(self, key: Key) -> None:
        """Do nothing, because the operator keeps no state for templates."""
