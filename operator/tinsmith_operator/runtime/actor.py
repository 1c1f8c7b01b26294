"""The component that carries out actions by sending requests. This module makes no decisions.

If an action fails, the remaining actions of the decision are skipped. Events are the exception: once the status is
written, no decision contains them again. Events that were not written are therefore written in the next round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import takewhile
from typing import assert_never

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.owner import Reconciled
from tinsmith_operator.ca.issuer import Issuer
from tinsmith_operator.common.actions import (
    Action,
    AddFinalizer,
    Annotate,
    Apply,
    Create,
    Delete,
    Emit,
    IssueCertificate,
    RemoveFinalizer,
    WriteStatus,
)
from tinsmith_operator.common.drift import own_managed_fields, with_answer
from tinsmith_operator.common.observed import Stored
from tinsmith_operator.errors import AlreadyExists, Conflict, NotFound, NotLeading, Refused, Unavailable
from tinsmith_operator.kube.cache import Cache, trimmed
from tinsmith_operator.kube.client import Cluster
from tinsmith_operator.kube.events import Events
from tinsmith_operator.kube.resources import BY_KIND, Key, Ref, ref_of, version_of
from tinsmith_operator.logs import get_logger

# How long the cache keeps an object that no watch shows, before the operator reads it again.
BELIEVED_SECONDS = 60.0
# The number of unwritten Events of one owner that the operator keeps while the API server accepts none.
MAX_UNWRITTEN_EVENTS = 10

log = get_logger(__name__)


class Actor:
    """A component that carries out the actions of a decision, and stores each answer in the cache."""

    def __init__(self, cluster: Cluster, cache: Cache, issuer: Issuer, events: Events) -> None:
        self._cluster = cluster
        self._cache = cache
        self._issuer = issuer
        self._events = events
        self._refusals: dict[Key, dict[str, str]] = {}
        self._stored: dict[Key, dict[str, Stored]] = {}
        self._unwritten: dict[Key, list[Emit]] = {}

    def refusals(self, key: Key) -> dict[str, str]:
        """Return, for each kind, the API server's message if the latest create or apply was refused.

        A successful create or apply removes the message about an earlier refusal.
        """
        return dict(self._refusals.get(key, {}))

    def stored(self, key: Key) -> dict[str, Stored]:
        """Return, for each kind, the answer to the latest create or apply if the answer differs from the request."""
        return dict(self._stored.get(key, {}))

    def forget(self, key: Key) -> None:
        self._refusals.pop(key, None)
        self._stored.pop(key, None)
        self._unwritten.pop(key, None)

    async def act(self, owner: Reconciled, actions: Sequence[Action]) -> None:
        """Carry out the actions in order. Raises ClusterError and NotLeading.

        After a refusal, only the status and Events are written, so that users see the reason. The API server may refuse
        the status itself, for example because the CRD is older than this operator. If the API server refuses the
        status, the children are still written.
        """
        round_ = _Round(owner)
        unwritten = self._unwritten.pop(_key(owner), [])
        all_actions = [*(event for event in unwritten if event not in actions), *actions]
        try:
            await self._carry_out(round_, all_actions)
        finally:
            if round_.unwritten_events:
                self._unwritten[_key(owner)] = round_.unwritten_events[-MAX_UNWRITTEN_EVENTS:]

    async def _carry_out(self, round_: _Round, actions: Sequence[Action]) -> None:
        refusals: list[Refused] = []
        only_reports = False
        for index, action in enumerate(actions):
            if only_reports and not isinstance(action, WriteStatus | Emit):
                continue
            try:
                await self._do(round_, action)
            except Refused as error:
                refusals.append(error)
                only_reports = only_reports or not isinstance(action, WriteStatus)
            except (NotLeading, Unavailable) as error:
                # The lease may have been renewed late. A status that was not answered may have been written.
                if isinstance(action, Emit) or (isinstance(action, WriteStatus) and isinstance(error, Unavailable)):
                    later = actions[index + 1 :] if isinstance(action, WriteStatus) else actions[index:]
                    before_status = takewhile(lambda each: not isinstance(each, WriteStatus), later)
                    round_.unwritten_events += [each for each in before_status if isinstance(each, Emit)]
                raise
        if refusals:
            raise Refused("; ".join(map(str, refusals))) from refusals[0]

    async def _do(self, round_: _Round, action: Action) -> None:
        match action:
            case Create():
                await self._create(round_.owner, action.manifest)
            case Apply():
                await self._apply(round_.owner, action.manifest, action.uid, action.resource_version)
            case Annotate():
                await self._annotate(round_.owner, action)
            case IssueCertificate():
                await self._issue(round_.owner, action)
            case Delete():
                await self._delete(round_.owner, action)
            case WriteStatus():
                await self._write_status(round_, action.status)
            case AddFinalizer():
                await self._write_finalizers(round_, (*round_.owner.finalizers, action.name))
            case RemoveFinalizer():
                left = tuple(name for name in round_.owner.finalizers if name != action.name)
                await self._write_finalizers(round_, left)
            case Emit():
                await self._emit(round_, action)
            case _:
                assert_never(action)

    async def _emit(self, round_: _Round, event: Emit) -> None:
        """Write the Event. If the API server does not answer, keep this Event and the round's later ones."""
        if not round_.unwritten_events:
            try:
                await self._events.emit(round_.owner, event)
            except Unavailable as error:
                log.warning("event not written yet", reason=event.reason, error=str(error))
            else:
                return
        round_.unwritten_events.append(event)

    async def _create(self, owner: Reconciled, manifest: Manifest) -> None:
        resource, ref = BY_KIND[manifest["kind"]], ref_of(manifest)
        try:
            created = await self._cluster.create(resource, manifest)
        except AlreadyExists:
            await self._look(ref)
            raise
        except Refused as error:
            self._note_refusal(owner, ref.kind, error)
            raise
        self._note_success(owner, manifest, created)
        log.info("created", object=f"{ref.kind}/{ref.name}")

    async def _apply(self, owner: Reconciled, manifest: Manifest, uid: str, version: str) -> None:
        resource, ref = BY_KIND[manifest["kind"]], ref_of(manifest)
        guard = {"uid": uid, "resourceVersion": version}
        try:
            guard["resourceVersion"] = await self._own_created_fields(ref, guard)
            metadata = {**manifest["metadata"], **guard}
            applied = await self._cluster.apply(resource, {**manifest, "metadata": metadata})
        except Conflict:
            await self._look(ref)
            raise
        except Refused as error:
            self._note_refusal(owner, ref.kind, error)
            raise
        self._note_success(owner, manifest, applied)
        log.info("applied", object=f"{ref.kind}/{ref.name}")

    async def _own_created_fields(self, ref: Ref, guard: Manifest) -> str:
        """Record the operator as the manager of the fields that the apply must be able to remove.

        Return the version of the object for the apply.
        """
        version: str = guard["resourceVersion"]
        known = self._cache.peek(ref)
        if known is None or known["metadata"]["resourceVersion"] != version or not _needs_own_fields(known):
            return version
        # The cache has only a summary of the managed fields.
        resource = BY_KIND[ref.kind]
        try:
            live = await self._cluster.get(resource, ref.namespace, ref.name)
        except NotFound as error:
            raise Conflict(str(error)) from error
        if live["metadata"]["resourceVersion"] != version:
            raise Conflict(f"{ref.kind} {ref.name} has changed.")
        changed = await self._cluster.own_created_fields(resource, live, own_managed_fields(live))
        self._cache.note(changed)
        changed_version: str = changed["metadata"]["resourceVersion"]
        return changed_version

    async def _annotate(self, owner: Reconciled, action: Annotate) -> None:
        resource, ref = BY_KIND[action.kind], Ref(action.kind, owner.namespace, action.name)
        place = {"name": action.name, "namespace": owner.namespace}
        version = {"metadata": {**place, "uid": action.uid, "resourceVersion": action.resource_version}}
        try:
            changes = {"metadata": {"annotations": dict(action.annotations)}}
            answer = await self._cluster.merge(resource, version, changes)
        except (Conflict, NotFound):
            await self._look(ref)
            raise
        except Refused as error:
            if action.desired is not None:
                self._note_refusal(owner, ref.kind, error)
            raise
        if action.desired is not None:
            self._note_success(owner, action.desired, answer)
        else:
            self._cache.note(answer)
        log.info("annotated", object=f"{ref.kind}/{ref.name}", **action.annotations)

    async def _issue(self, owner: Reconciled, action: IssueCertificate) -> None:
        leaf = self._issuer.issue_for_worker(action.dns_names)
        manifest = {**action.manifest, "data": leaf.secret_data()}
        if action.uid is None or action.resource_version is None:
            await self._create(owner, manifest)
        else:
            await self._apply(owner, manifest, action.uid, action.resource_version)

    async def _delete(self, owner: Reconciled, action: Delete) -> None:
        resource, namespace = BY_KIND[action.kind], owner.namespace
        log.info("deleting", object=f"{action.kind}/{action.name}", why=action.why)
        try:
            guards = (action.grace_period_seconds, action.resource_version)
            left = await self._cluster.delete(resource, namespace, action.name, action.uid, *guards)
        except (NotFound, Conflict):
            # The object is gone. After a conflict, the name belongs to another object, or the object has changed.
            await self._look(Ref(action.kind, namespace, action.name))
            return
        if left.get("kind") != action.kind:
            return
        if _is_leaving(left):
            self._cache.note(left)
        else:
            # Some objects, such as a pod without a node, vanish at once. The watch may have reported the end before
            # this answer.
            self._cache.note_end(ref_of(left), left["metadata"]["uid"], version_of(left))

    async def _write_status(self, round_: _Round, status: Manifest) -> None:
        manifest = {
            "apiVersion": round_.resource.api_version,
            "kind": round_.resource.kind,
            "metadata": {**round_.place, **round_.guard},
            "status": status,
        }
        await self._write_owner(round_, self._cluster.apply(round_.resource, manifest, "status"))

    async def _write_finalizers(self, round_: _Round, finalizers: tuple[str, ...]) -> None:
        manifest = {"kind": round_.resource.kind, "metadata": {**round_.place, **round_.guard}}
        changes = {"metadata": {"finalizers": list(finalizers)}}
        await self._write_owner(round_, self._cluster.merge(round_.resource, manifest, changes))

    async def _write_owner(self, round_: _Round, request: Awaitable[Manifest]) -> None:
        try:
            written = await request
        except (Conflict, NotFound):
            await self._look(Ref(round_.resource.kind, round_.owner.namespace, round_.owner.name))
            raise
        round_.version = written["metadata"]["resourceVersion"]
        self._cache.note(written)

    async def _look(self, ref: Ref) -> None:
        """Read the object into the cache, because the action was based on an old state."""
        resource = BY_KIND[ref.kind]
        # Read the version before the request. During the request, a watch may report another, living object of this
        # name.
        known = self._cache.peek(ref)
        try:
            live = await self._cluster.get(resource, ref.namespace, ref.name)
        except NotFound:
            if known is not None:
                self._cache.note_end(ref, known["metadata"]["uid"], version_of(known) + 1)
            return
        self._cache.note(live)
        if not resource.selects(live):
            asyncio.get_running_loop().call_later(BELIEVED_SECONDS, self._cache.drop_if_unwatched, ref)

    def _note_success(self, owner: Reconciled, request: Manifest, answer: Manifest) -> None:
        key = _key(owner)
        self._refusals.get(key, {}).pop(request["kind"], None)
        self._stored[key] = with_answer(self.stored(key), request, trimmed(answer))
        self._cache.note(answer)

    def _note_refusal(self, owner: Reconciled, kind: str, error: Refused) -> None:
        self._refusals.setdefault(_key(owner), {})[kind] = str(error)


class _Round:
    """The owner, with its version, while the actions of one decision are carried out.

    Each write changes the version of the owner.
    """

    def __init__(self, owner: Reconciled) -> None:
        self.owner = owner
        self.resource = BY_KIND[owner.KIND]
        self.version = owner.resource_version
        self.unwritten_events: list[Emit] = []

    @property
    def place(self) -> Manifest:
        return {"name": self.owner.name, "namespace": self.owner.namespace}

    @property
    def guard(self) -> Manifest:
        return {"uid": self.owner.uid, "resourceVersion": self.version}


def _needs_own_fields(manifest: Manifest) -> bool:
    """Return whether the managed fields must change before an apply."""
    managed: list[Manifest] = manifest["metadata"].get("managedFields", [])
    return own_managed_fields(manifest) != managed


def _is_leaving(answer: Manifest) -> bool:
    """Return whether the answer to a delete shows that the object remains for a grace period or finalizers."""
    metadata = answer["metadata"]
    waits = metadata.get("deletionGracePeriodSeconds") or metadata.get("finalizers")
    return "deletionTimestamp" in metadata and bool(waits)


def _key(owner: Reconciled) -> Key:
    return Key(owner.namespace, owner.name, owner.KIND)
