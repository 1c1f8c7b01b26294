"""The fleet in a cluster: TrainingSessions, SamplerPools, and sessions that a SessionTemplate allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from tinsmith_server.errors import WorkerAbsent, WorkerUnavailable
from tinsmith_server.fleet.base import Changes, Fleet, SamplerHandle, ScaledPool, ServedModel, WorkerHandle
from tinsmith_server.fleet.channels import TlsDirectory
from tinsmith_server.fleet.kubernetes.api import (
    ENDPOINTS,
    POOLS,
    SESSIONS,
    TEMPLATES,
    AlreadyThere,
    ApiRefused,
    KubernetesApi,
    KubernetesError,
    Manifest,
    own_namespace,
)
from tinsmith_server.fleet.kubernetes.sampler_pool import (
    Endpoint,
    Pool,
    PoolReplica,
    Pools,
    Slice,
    TargetOf,
    parse_pool,
    parse_slice,
)
from tinsmith_server.fleet.kubernetes.session_handle import Home, SessionHandle
from tinsmith_server.fleet.kubernetes.session_template import SessionTemplate, parse_template
from tinsmith_server.fleet.kubernetes.training_session import SpecPart, TrainingSession, parse_session, pending_template
from tinsmith_server.fleet.kubernetes.waking import Waker
from tinsmith_server.fleet.kubernetes.watching import Key, Scope, SharedRefresh, View, scope_of, together
from tinsmith_server.logs import get_logger
from tinsmith_server.settings import Settings
from tinsmith_server.store.records import Worker

if TYPE_CHECKING:
    from tinsmith_server.store.store import Store

log = get_logger(__name__)


# The accepted age of a shared refresh, and its time limit.
REFRESH_AGE_SECONDS = 2.0
REFRESH_TIMEOUT_SECONDS = 10.0


def target_of(endpoint: Endpoint) -> str:
    return endpoint.target


class KubernetesFleet(Fleet):
    """The workers and samplers of a cluster.

    The volume of a worker's session identifies the worker: the worker's ID is the UID of the volume's claim. A pool's
    replica is a pod. The constructor raises StartupError if the namespace cannot be read.
    """

    def __init__(self, settings: Settings, target_of: TargetOf = target_of) -> None:
        """Prepare the views.

        `target_of` maps an endpoint to its address, for servers outside the cluster's network.
        """
        self._scope = scope_of(settings.fleet_namespaces, own_namespace())
        self._api = KubernetesApi()
        self._tls = TlsDirectory(settings.fleet_tls_directory)
        self._changes = Changes()
        # This server may create sessions in one namespace, and creates none from the templates of other namespaces.
        home = Scope((self._scope.home,) if self._scope.home is not None else (), self._scope.home)
        self._template_view = View(self._api, TEMPLATES, home, parse_template, self._changes.note, required=False)
        self._session_view = View(self._api, SESSIONS, self._scope, self._parse_session, self._take_sessions)
        self._pool_view = View(self._api, POOLS, self._scope, parse_pool, self._take_pools)
        self._endpoint_view = View(self._api, ENDPOINTS, self._scope, parse_slice, self._take_pools)
        self._refresh = SharedRefresh(self._list_all, REFRESH_AGE_SECONDS, REFRESH_TIMEOUT_SECONDS)
        self._waker = Waker(self._api.want)
        self._provisioner = SessionProvisioner(
            self._api, lambda: list(self._template_view.objects.values()), self._session_view.note, self._waker
        )
        self._sessions: Mapping[Key, TrainingSession] = {}
        self._handles: dict[str, SessionHandle] = {}
        self._pools = Pools(self._tls, target_of, self._close_later)
        self._last_sessions: dict[str, str] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._epochs: Store | None = None
        # Without an autoscaler that asks this installation, a note of the demand would wake nothing.
        self._scales = settings.scaler_port is not None

    @override
    async def begin(self) -> None:
        """Do nothing, because workers in a cluster run without this server."""

    @override
    async def open(self, epochs: Store) -> None:
        """Return when all objects are listed.

        With an incomplete list, this server would refuse models and create unnecessary sessions.
        """
        self._epochs = epochs
        await self._template_view.open()
        await together(view.open() for view in self._views if view is not self._template_view)

    @override
    async def close(self) -> None:
        await self._refresh.close()
        await self._waker.close()
        await asyncio.gather(*(view.close() for view in self._views))
        await asyncio.gather(*(one.close() for one in self._connected), *self._closing)
        await self._api.close()

    @property
    @override
    def changes(self) -> Changes:
        return self._changes

    @property
    @override
    def models(self) -> Sequence[ServedModel]:
        """The models of the templates, and the models of all sessions and pools, running or not."""
        of_sessions = {session.model for session in self._sessions.values() if not session.deleted}
        of_pools = {pool.model for pool in self._pools.pools}
        names = of_sessions | of_pools | {template.spec.model.name for template in self._templates}
        return [served for name in sorted(names) if (served := self.model(name))]

    @override
    def model(self, name: str) -> ServedModel | None:
        specs = self._specs(name)
        pools = [pool for pool in self._pools.pools if pool.model == name]
        if not specs and not pools:
            return None
        limits = [spec.max_sequence_length for spec in specs] + [pool.max_sequence_length for pool in pools]
        sampling_ranks = [pool.max_rank for pool in pools]
        sampling_ranks += [spec.adapters.max_rank for spec in specs if spec.sampling != "None"]
        architectures = [one.architecture for one in self._connected if one.base_model == name]
        return ServedModel(
            name=name,
            weights=name,
            architecture=next((one for one in architectures if one), None),
            max_context_length=min((limit for limit in limits if limit is not None), default=None),
            max_rank=max((spec.adapters.max_rank for spec in specs), default=None),
            max_sampling_rank=max(sampling_ranks, default=None),
            training=bool(specs),
            sampling=bool(sampling_ranks),
        )

    @property
    @override
    def workers(self) -> Sequence[WorkerHandle]:
        return list(self._handles.values())

    @override
    def worker(self, worker_id: str) -> WorkerHandle:
        try:
            return self._handles[worker_id]
        except KeyError:
            raise WorkerAbsent(self._absence(worker_id)) from None

    @override
    def trainers(self, base_model: str, rank: int) -> Sequence[WorkerHandle]:
        return [one for one in self._at_work(base_model) if one.session.suits(rank, sampling=False)]

    @override
    def samplers(self, base_model: str, rank: int = 0) -> Sequence[SamplerHandle]:
        colocated = [one for one in self._at_work(base_model) if one.session.suits(rank, sampling=True)]
        return [*self._pools.replicas_for(base_model, rank), *colocated]

    @override
    def want_samplers(self, base_model: str, rank: int = 0) -> None:
        is_unserved = self._scales and not self._pools.replicas_for(base_model, rank)
        for pool in self._pools.suitable(base_model, rank):
            if pool.asleep:
                self._waker.wake(POOLS, pool)
            elif is_unserved and not pool.is_past_deadline:
                self._waker.note_demand(POOLS, pool.key)

    @override
    def scaled_pool(self, namespace: str, name: str) -> ScaledPool | None:
        pool = next((one for one in self._pools.pools if one.key == (namespace, name)), None)
        if pool is None or pool.is_past_deadline:
            return None
        replicas = [one for one in self._pools.replicas if one.pool.uid == pool.uid and one.endpoint.at_work]
        return ScaledPool(pool.title, pool.wanted_at, replicas)

    @property
    @override
    def all_samplers(self) -> Sequence[SamplerHandle]:
        # A worker that is neither connected nor ready has lost its samples, or may stay unreachable for long.
        workers = [one for one in self._handles.values() if one.running() or one.session.at_work]
        return [*(one for one in self._pools.replicas if one.may_answer), *workers]

    @override
    async def refresh(self) -> None:
        try:
            await self._refresh.recent()
        except (KubernetesError, TimeoutError) as error:
            raise WorkerUnavailable(f"the samplers cannot be listed: {error!r}") from error

    @override
    async def provide(self, base_model: str, *, rank: int = 0, sampling: bool = False) -> str:
        if sampling:
            self.want_samplers(base_model, rank)
        in_the_way = self._pools.why_none(base_model, rank) if sampling else None
        if in_the_way is None:
            return await self._provisioner.provide(self._sessions, base_model, rank, sampling)
        if not self._pools.are_waking(base_model, rank):
            # A session of the model samples while the pool cannot.
            in_the_way = self._provisioner.wake(self._sessions, base_model, rank, sampling) or in_the_way
        return in_the_way

    @override
    async def permanently_lost_reason(self, worker: Worker) -> str | None:
        """Return the reason if the last known namespace of the worker no longer contains the claim of its volume."""
        home = Home.parse(worker.home)
        is_elsewhere = home.cluster != self._api.cluster or not self._scope.covers(home.namespace)
        if is_elsewhere or worker.worker_id in self._handles:
            return None
        try:
            claims = await self._api.claim_uids(home.namespace)
        except KubernetesError as error:
            log.warning("volume claims not listed", namespace=home.namespace, reason=str(error))
            return None
        title = f"TrainingSession {home.namespace}/{home.name}"
        return None if worker.worker_id in claims else f"the volume of {title} was deleted"

    @property
    @override
    def problem(self) -> str | None:
        return next((problem for view in self._views if (problem := view.problem)), None)

    async def _list_all(self) -> bool:
        """List all objects. Return whether something changed."""
        watches = [watch for view in self._views for watch in view.watches if not watch.refused]
        # This method waits for all lists, even after a failure. A list that continued could start a watch after the
        # fleet was closed.
        outcomes = await asyncio.gather(*(watch.refresh() for watch in watches), return_exceptions=True)
        for failure in outcomes:
            if isinstance(failure, BaseException):
                raise failure
        return any(outcomes)

    @property
    def _views(self) -> tuple[View[SessionTemplate], View[TrainingSession], View[Pool], View[Slice]]:
        return self._template_view, self._session_view, self._pool_view, self._endpoint_view

    @property
    def _templates(self) -> list[SessionTemplate]:
        return [template for template in self._template_view.objects.values() if not template.deleted]

    def _parse_session(self, manifest: Manifest) -> TrainingSession | None:
        """Return the session, or None while nothing is known about its model."""
        name = pending_template(manifest)
        template = self._template_view.objects.get(name) if name is not None else None
        if name is not None and template is None:
            return None
        return parse_session(manifest, template.spec if template is not None else None)

    @property
    def _connected(self) -> list[SessionHandle | PoolReplica]:
        """All handles with a connection from this server."""
        return [*self._handles.values(), *self._pools.replicas]

    def _at_work(self, base_model: str) -> list[SessionHandle]:
        return [one for one in self._handles.values() if one.base_model == base_model and one.session.at_work]

    def _specs(self, base_model: str) -> list[SpecPart]:
        of_sessions = [session.spec for session in self._sessions.values() if not session.deleted]
        of_templates = [template.spec for template in self._templates]
        return [spec for spec in (*of_sessions, *of_templates) if spec.model.name == base_model]

    def _take_pools(self) -> None:
        self._pools.take(self._pool_view.objects, self._endpoint_view.objects.values())
        self._changes.note()

    def _take_sessions(self) -> None:
        """Update the handles after a change. Each session's volume has one handle."""
        assert self._epochs is not None
        self._sessions = self._session_view.objects
        # After a rename, two sessions can name one volume for a moment. The handle then stands for the session that
        # runs.
        by_use = sorted(self._sessions.values(), key=lambda session: (session.at_work, session.ready))
        present = {session.worker_id: session for session in by_use if session.worker_id}
        for worker_id in self._handles.keys() - present.keys():
            handle = self._handles.pop(worker_id)
            self._last_sessions[worker_id] = handle.session.title
            self._close_later(handle)
        for worker_id, session in present.items():
            if worker_id in self._handles:
                self._handles[worker_id].update(session)
            else:
                self._handles[worker_id] = SessionHandle(
                    worker_id, session, self._tls, self._epochs, self._api.cluster, self._waker
                )
        self._changes.note()

    def _close_later(self, handle: SessionHandle | PoolReplica) -> None:
        task = asyncio.create_task(handle.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _absence(self, worker_id: str) -> str:
        title = self._last_sessions.get(worker_id)
        if title is None:
            return f"no TrainingSession of {self._scope} has the volume {worker_id} of this model"
        return f"{title} was deleted; if its volume was kept, apply the session again to continue"


# A spec that the cluster refuses will be refused again until an administrator changes something.
REFUSED_SECONDS = 30.0


class SessionProvisioner:
    """An object that creates sessions from templates.

    The provisioner creates the next session when the last session is ready and full.
    """

    def __init__(
        self,
        api: KubernetesApi,
        templates: Callable[[], Sequence[SessionTemplate]],
        made: Callable[[Manifest], None],
        waker: Waker,
    ) -> None:
        """Create the provisioner.

        `templates` returns the present templates. `made` is called with each new session, before the watch reports the
        session. `waker` wakes a session that is suspended because it was idle.
        """
        self._waker = waker
        self._api = api
        self._templates = templates
        self._made = made
        self._turn = asyncio.Lock()
        self._refusals: dict[str, tuple[str, float]] = {}

    async def provide(self, sessions: Mapping[Key, TrainingSession], base_model: str, rank: int, sampling: bool) -> str:
        """Wake an idle session, or create one if a template allows this.

        Return a message that says what the caller is waiting for.
        """
        async with self._turn:
            fitting = _fitting(sessions, base_model, rank, sampling)
            coming = next((one for one in fitting if one.coming), None)
            if coming is not None:
                return coming.unavailable_reason_text()
            waking = self.wake(sessions, base_model, rank, sampling)
            if waking is not None:
                return waking
            templates = [each for each in self._templates() if each.suits(base_model, rank, sampling)]
            for template in templates:
                neighbours = {one.name: one for one in sessions.values() if one.namespace == template.namespace}
                outcome = await self._grow(template, neighbours)
                if outcome is not None:
                    return outcome
            return _nothing_more(fitting, templates) or _nothing_fits(base_model, rank, sampling)

    def wake(self, sessions: Mapping[Key, TrainingSession], base_model: str, rank: int, sampling: bool) -> str | None:
        """Wake a session that is suspended because it was idle. Return a message about it, or None if there is none.

        A model needs a free place. A session without one wakes when one of its models is used or released.
        """
        fitting = _fitting(sessions, base_model, rank, sampling)
        asleep = next((one for one in fitting if one.asleep and (sampling or one.has_places)), None)
        if asleep is None:
            return None
        self._waker.wake(SESSIONS, asleep)
        return asleep.unavailable_reason_text()

    async def _grow(self, template: SessionTemplate, sessions: Mapping[str, TrainingSession]) -> str | None:
        """Return a message about the session that the template provides, or None if it allows no more sessions.

        `sessions` are the sessions of the namespace.
        """
        own = [session for session in sessions.values() if session.template == template.name]
        stalled = next((one for one in own if one.stalled and not one.ready and not one.deleted), None)
        if stalled is not None:
            # A second session with the same spec would not become ready either.
            return stalled.unavailable_reason_text()
        name = template.next_name(sessions)
        if name is None:
            return None
        reason, until = self._refusals.get(template.name, ("", 0.0))
        if asyncio.get_running_loop().time() < until:
            return reason
        return await self._create(template, name)

    async def _create(self, template: SessionTemplate, name: str) -> str:
        being_made = f"TrainingSession {template.namespace}/{name} is being created"
        try:
            made = await self._api.create_session(template.manifest(name))
        except AlreadyThere:
            # Another server or the operator has created the session first. The watch will report it.
            return being_made
        except KubernetesError as error:
            reason = f"no session can be created from the template {template.name}: {error}"
            log.warning("session not made", template=template.name, reason=str(error))
            if isinstance(error, ApiRefused):
                self._refusals[template.name] = (reason, asyncio.get_running_loop().time() + REFUSED_SECONDS)
            return reason
        log.info("session made", session=name, template=template.name)
        self._made(made)
        return being_made


def _fitting(
    sessions: Mapping[Key, TrainingSession], base_model: str, rank: int, sampling: bool
) -> list[TrainingSession]:
    return [one for one in sessions.values() if one.model == base_model and one.suits(rank, sampling)]


def _nothing_more(sessions: Sequence[TrainingSession], templates: Sequence[SessionTemplate]) -> str | None:
    """Return why there is no more capacity and what to do, or None if no session and no template fits."""
    idle = next((session for session in sessions if not session.at_work and not session.deleted), None)
    if idle is not None:
        return idle.unavailable_reason_text()
    if templates:
        limits = ", ".join(f"{each.name} has all {each.spec.max_sessions} of its sessions" for each in templates)
        return f"wait for a model to end, or ask an administrator to raise spec.maxSessions of a template ({limits})"
    if sessions:
        return f"wait for a model to end, or ask an administrator to add a TrainingSession for {sessions[0].model}"
    return None


def _nothing_fits(base_model: str, rank: int, sampling: bool) -> str:
    if sampling:
        what = f"no SamplerPool and no TrainingSession samples from {base_model}"
    else:
        what = f"no TrainingSession trains {base_model}"
    return f"{what} at LoRA rank {rank}; ask an administrator to add one"
