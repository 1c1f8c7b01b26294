"""The parts of the operator, and the order in which the parts start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import datetime
from typing import Any

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.ca.issuer import LOOK_AGAIN_SECONDS, Issuer
from tinsmith_operator.errors import OperatorError
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.client import Cluster, Permit
from tinsmith_operator.kube.events import Events
from tinsmith_operator.kube.rate_limit import Priority, RateLimit
from tinsmith_operator.kube.resources import (
    LEASES,
    PODS,
    POOLS,
    RAY_CLUSTERS,
    RECONCILED,
    SECRETS,
    SESSIONS,
    TEMPLATES,
    WATCHED,
    Key,
    Ref,
    Resource,
    is_of_an_owner,
    ref_of,
    version_of,
)
from tinsmith_operator.kube.server_clock import ServerClock
from tinsmith_operator.kube.watch_stream import ListAnswered
from tinsmith_operator.logs import get_logger
from tinsmith_operator.metrics import Metrics
from tinsmith_operator.runtime.actor import Actor
from tinsmith_operator.runtime.controller import Controller
from tinsmith_operator.runtime.first_api_key import FirstApiKey
from tinsmith_operator.runtime.handlers import Watch
from tinsmith_operator.runtime.health import HealthServer
from tinsmith_operator.runtime.image_digests import ImageDigests
from tinsmith_operator.runtime.informer import Informer
from tinsmith_operator.runtime.leader import Leader
from tinsmith_operator.runtime.observe import certificate_at
from tinsmith_operator.runtime.progress import ProgressWriter
from tinsmith_operator.runtime.ray_cluster_informer import RayClusterInformer
from tinsmith_operator.runtime.reconcile import (
    Kind,
    PoolKind,
    Reconciler,
    SessionKind,
    TemplateKind,
    pool_of_replica,
)
from tinsmith_operator.runtime.turns import Turns
from tinsmith_operator.runtime.worker_client import (
    Describe,
    GrpcDescriber,
    GrpcSnapshots,
    Reports,
    Snapshots,
    TakeSnapshot,
)
from tinsmith_operator.runtime.workqueue import WorkQueue
from tinsmith_operator.settings import Settings

# A pod has 30 s to terminate, and this is a part of that time.
FINISH_SECONDS = 20.0
ISSUER_RETRY_SECONDS = 5.0
UNWATCHED_LOOK_SECONDS = 60.0

log = get_logger(__name__)


class Operator:
    """The whole operator. Call `run` once.

    - `around_permit`: wraps the permit of each write, so that a test can act between two writes.
    - `describe`, `snapshot`: the functions that call workers; the default functions use gRPC.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        around_permit: Callable[[Permit], Permit] = lambda permit: permit,
        describe: Describe | None = None,
        snapshot: TakeSnapshot | None = None,
    ) -> None:
        self._settings = settings
        self.metrics = Metrics()
        self._queue: WorkQueue[Key] = WorkQueue()
        self._leading = asyncio.Event()
        self._issuer_wakeup = asyncio.Event()
        self._acts = asyncio.Event()
        self._cache = Cache(self._enqueue)
        self._leader = self._make_leader()
        self._limit = RateLimit(settings.max_requests_per_second, settings.burst)
        self._clock = ServerClock()
        self._cluster = Cluster(self._limit, around_permit(self._leader.permit), self.metrics.note_request, self._clock)
        self._informer = Informer(self._cluster, self._cache, settings.scope, lambda _part: self._enqueue_all())
        self._watches: list[Watch] = []
        self._ray_clusters = self._make_ray_clusters()
        self._issuer, self._first_api_key = self._make_issuer(), self._make_first_key()
        describe = describe or GrpcDescriber(self._issuer.operator_leaf, self._clock.now)
        leads = self._leading.is_set
        self._progress = ProgressWriter(self._cluster, self._cache, leads)
        self._reports = Reports(describe, settings.describe_seconds, self._enqueue, leads, self._progress.note)
        self._replica_reports = Reports(
            describe, settings.describe_seconds, lambda replica: self._enqueue(pool_of_replica(replica)), leads
        )
        self._snapshots = Snapshots(snapshot or GrpcSnapshots(self._issuer.operator_leaf), self._enqueue, leads)
        self._image_digests = ImageDigests()
        self._turns = Turns(settings.restart_policy, self._cache, self._enqueue, self._clock.now)
        self._controller = self._make_controller()
        self._server = self._make_server()
        self._watch_metrics()

    @property
    def health_port(self) -> int:
        return self._server.health_port

    @property
    def metrics_port(self) -> int:
        return self._server.metrics_port

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. If an error ends the operator before `stop` is set, raise the error."""
        async with self._server:
            tasks = [asyncio.create_task(job) for job in self._jobs()]
            try:
                await self._until(stop, tasks)
            finally:
                await self._stop(tasks)

    def _jobs(self) -> list[Coroutine[Any, Any, None]]:
        workers = [self._controller.run() for _ in range(self._settings.concurrent_reconciles)]
        watching = [self._watch_cluster(), self._ray_clusters.run()]
        reporting = [self._progress.run(), *workers]
        return [*watching, self._leader.run(), self._ensure_certificates(), self._resync(), *reporting]

    async def _watch_cluster(self) -> None:
        known = await self._informer.check_kinds()
        late = (self._watch_late(resource) for resource in WATCHED if resource not in known)
        await asyncio.gather(self._watch_kinds(known), *late)

    async def _watch_late(self, resource: Resource) -> None:
        await self._informer.wait_for_kind(resource)
        await self._watch_kinds((resource,))

    async def _watch_kinds(self, resources: Sequence[Resource]) -> None:
        watch = self._make_watch(self._informer.on_list, resources)
        self._watches.append(watch)
        await watch.run()

    async def _until(self, stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
        stopped = asyncio.create_task(_wait(stop))
        try:
            await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        for task in tasks:
            if task.done():
                task.result()
                raise OperatorError("A task of the operator ended unexpectedly.")

    async def _stop(self, tasks: list[asyncio.Task[None]]) -> None:
        """Take no more keys, finish the reconciles that run, and only then free the Lease."""
        log.info("stopping", running=self._queue.running)
        self._acts.clear()
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await self._queue.join()
        except TimeoutError:
            log.warning("reconciles cut short", running=self._queue.running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(self._reports.close(), self._replica_reports.close())
        await self._snapshots.close()
        await self._leader.release()
        await asyncio.gather(*(watch.stop() for watch in self._watches))
        await self._cluster.close()

    def _make_leader(self) -> Leader:
        settings = self._settings
        return Leader(
            lambda: self._cluster.read_lease(LEASES, settings.namespace, settings.lease),
            lambda lease, seconds: self._cluster.write_lease(LEASES, lease, seconds),
            namespace=settings.namespace,
            name=settings.lease,
            identity=settings.identity,
            lease_seconds=settings.lease_seconds,
            renew_seconds=settings.lease_renew_seconds,
            changed=self._on_leading,
        )

    def _make_watch(self, on_list: ListAnswered, resources: Sequence[Resource]) -> Watch:
        scope, observe = self._settings.scope, self.metrics.note_request
        return Watch(scope, self._take, on_list, observe, lambda: self._limit.wait(Priority.ESSENTIAL), resources)

    def _make_ray_clusters(self) -> RayClusterInformer:
        return RayClusterInformer(
            self._cluster,
            self._cache,
            self._settings.scope,
            changed=self._enqueue_all,
            open_watch=lambda on_list: self._make_watch(on_list, (RAY_CLUSTERS,)),
            look_again_seconds=self._settings.discovery_seconds,
        )

    def _make_issuer(self) -> Issuer:
        return Issuer(
            self._cluster,
            namespace=self._settings.namespace,
            release=self._settings.release,
            authority_secret=self._settings.ca_secret_name,
            api_server_secret=self._settings.api_server_tls_secret_name,
            leaves=self._leaves,
            pause_seconds=self._settings.ca_pause_seconds,
            clock=self._clock.now,
        )

    def _make_first_key(self) -> FirstApiKey:
        return FirstApiKey(
            self._cluster,
            namespace=self._settings.namespace,
            release=self._settings.release,
            secret=self._settings.first_key_secret,
        )

    def _make_server(self) -> HealthServer:
        return HealthServer(
            self._settings.health_port,
            self._settings.metrics_port,
            self._liveness_problem,
            self._readiness_problem,
            self.metrics.render,
            remarks=self._remarks,
        )

    def _watch_metrics(self) -> None:
        self.metrics.watch(
            lambda: self._queue.depth,
            lambda: self._leader.is_leading,
            lambda: (owner for resource in RECONCILED for owner in self._cache.of_kind(resource.kind)),
            self._certificates,
            lambda: not self._leader.is_leading or self._issuer.problem is None,
            lambda: len(self._informer.refused),
            unknown_kinds=lambda: len(self._informer.unknown),
            clock_offset_seconds=lambda: self._clock.offset_seconds,
        )

    def _make_controller(self) -> Controller:
        events = Events(self._cluster, self._settings.identity)
        actor = Actor(self._cluster, self._cache, self._issuer, events)
        installation = self._settings.installation()
        kinds: dict[str, Kind] = {
            SESSIONS.kind: SessionKind(
                self._cache,
                actor,
                events,
                self._reports,
                self._snapshots,
                self._issuer,
                installation,
                self._ray_clusters,
                self._turns,
                self._image_digests,
                self._progress,
                self._clock.now,
            ),
            POOLS.kind: PoolKind(
                self._cache, actor, events, self._replica_reports, self._issuer, installation, self._clock.now
            ),
        }
        kinds[TEMPLATES.kind] = TemplateKind(self._cache, actor, self._clock.now)
        reconciler = Reconciler(self._cache, actor, kinds)
        return Controller(
            self._queue,
            reconciler.reconcile,
            reconciler.requested_state,
            self.metrics,
            self._acts,
            reconciler.identify,
            reconciler.precedence,
        )

    async def _ensure_certificates(self) -> None:
        """Keep the certificates valid while leading.

        The certificates are checked before the first reconcile, after a change of a Secret, and when a renewal is due.

        A problem with the certificates does not stop any session. Each session reports the problem, and keeps its
        present certificate.
        """
        while True:
            await self._leading.wait()
            self._issuer_wakeup.clear()
            before = (self._issuer.known_fingerprint, self._issuer.problem)
            key_seconds = await self._ensure_first_key()
            try:
                seconds = await self._issuer.refresh()
            except OperatorError as error:
                log.error("certificates not issued or stored", error=str(error))
                seconds = ISSUER_RETRY_SECONDS
            if self._issuer.is_known:
                await self._begin_acting(anew=(self._issuer.known_fingerprint, self._issuer.problem) != before)
            try:
                async with asyncio.timeout(min(seconds, key_seconds, self._longest_pause_seconds())):
                    await self._issuer_wakeup.wait()
            except TimeoutError:
                pass

    def _longest_pause_seconds(self) -> float:
        """Return the longest pause between two reads of the installation's Secrets.

        The Secrets are read regularly, because the watches may not cover the namespace of the installation.
        """
        is_watched = self._informer.knows(self._settings.namespace)
        return LOOK_AGAIN_SECONDS if is_watched else UNWATCHED_LOOK_SECONDS

    async def _ensure_first_key(self) -> float:
        """Create the first key, and return the seconds until the next attempt.

        Only the API server waits for the first key.
        """
        try:
            await self._first_api_key.ensure()
        except OperatorError as error:
            log.error("first API key not created", error=str(error))
            return ISSUER_RETRY_SECONDS
        return LOOK_AGAIN_SECONDS

    async def _begin_acting(self, *, anew: bool) -> None:
        await self._informer.complete.wait()
        # Do not check `is_leading` here. A slow renewal clears it for a moment without a new term, and no code would
        # call this function again. Each write asks for a permit anyway.
        if not self._leading.is_set():
            return
        if anew or not self._acts.is_set():
            self._enqueue_all()
        self._acts.set()

    def _resync(self) -> Coroutine[Any, Any, None]:
        return self._controller.resync(self._known_keys, self._settings.resync_seconds)

    def _known_keys(self) -> list[Key]:
        return [key for key in self._cache.reconciled() if self._informer.knows(key.namespace)]

    def _enqueue(self, key: Key) -> None:
        """Enqueue a key if the state of its namespace is known.

        When the state of a namespace becomes known, all keys in the namespace are enqueued.
        """
        if self._informer.knows(key.namespace):
            self._controller.enqueue(key)

    def _enqueue_all(self) -> None:
        for key in self._known_keys():
            self._controller.enqueue(key)

    def _on_leading(self, leading: bool) -> None:
        if leading:
            self._leading.set()
            self._issuer_wakeup.set()
        else:
            self._leading.clear()
            self._acts.clear()
            for background in (self._turns, self._reports, self._replica_reports, self._snapshots, self._progress):
                background.end()

    def _take(self, resource: Resource, event_type: str | None, manifest: Manifest) -> None:
        """Store an object that a watch reported."""
        ref = ref_of(manifest)
        if event_type == "DELETED":
            self._cache.note_end(ref, manifest["metadata"]["uid"], version_of(manifest))
        else:
            self._cache.note(manifest)
        if resource is PODS and (pod := self._cache.peek(ref)) is not None:
            # The first ready worker counts at once. Its session may wait for its turn to be reconciled.
            self._image_digests.note(pod)
        if resource is SECRETS and self._is_the_installations(ref):
            self._issuer_wakeup.set()

    def _is_the_installations(self, secret: Ref) -> bool:
        names = (*self._issuer.secret_names, *self._first_api_key.secret_names)
        return secret.namespace == self._settings.namespace and secret.name in names

    def _liveness_problem(self) -> str | None:
        return "the watch has ended" if any(watch.has_ended for watch in self._watches) else None

    def _readiness_problem(self) -> str | None:
        if self._informer.complete.is_set():
            return None
        missing = self._informer.missing
        return "\n".join([*([f"not listed yet: {', '.join(missing)}"] if missing else []), *self._informer.refused])

    def _remarks(self) -> list[str]:
        clock = self._clock.problem
        return [*self._informer.unknown, *self._informer.refused, *([clock] if clock is not None else [])]

    def _leaves(self) -> list[tuple[str, str]] | None:
        """Return each owner of a certificate, with the fingerprint of the authorities that this owner trusts.

        Return None while not all owners are known: before the first lists, and while the operator may not list a
        namespace.
        """
        if not self._informer.complete.is_set() or self._informer.refused:
            return None
        refs = (ref_of(secret) for secret in self._cache.of_kind(SECRETS.kind) if is_of_an_owner(secret))
        known = ((ref, certificate_at(self._cache, ref)) for ref in refs)
        return [(f"{ref.namespace}/{ref.name}", facts.authority_fingerprint) for ref, facts in known if facts]

    def _certificates(self) -> Iterable[tuple[str, str, datetime]]:
        """Yield the namespace, name and expiry of each certificate.

        The installation's own certificates are included only while this operator leads.
        """
        if self._leader.is_leading:
            for name, end in self._issuer.ends.items():
                yield self._settings.namespace, name, end
        for secret in self._cache.of_kind(SECRETS.kind):
            ref = ref_of(secret)
            if self._is_the_installations(ref):
                continue
            if (facts := certificate_at(self._cache, ref)) is not None:
                yield ref.namespace, ref.name, facts.not_after


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
