"""A Kubernetes in memory, just real enough to hold the operator's decisions against it.

It keeps one owner and its surroundings. `do` treats an action as the API server would: UIDs, resource versions and
preconditions. The other methods are what others in a cluster may do at any time; what depends on the owner's kind is in
`World` and `PoolWorld`.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from support.operator.resources import INSTALLATION, NOW
from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.common.actions import (
    Action,
    AddFinalizer,
    Annotate,
    Apply,
    Create,
    Decision,
    Delete,
    Emit,
    IssueCertificate,
    RemoveFinalizer,
    WriteStatus,
)
from tinsmith_operator.common.drift import with_answer
from tinsmith_operator.common.observed import CertificateFacts, KubernetesWarning, Stored, Surroundings
from tinsmith_operator.kube.cache import trimmed
from tinsmith_operator.session.upgrade import PIN_ANNOTATIONS

AUTHORITY = "authority-1"
AUTHORITY_END = NOW + timedelta(days=3650)
LEAF_LIFE = timedelta(days=30)

SOON_SECONDS = 2.0
"""The longest wait that counts as work in progress. Statuses wait so long for the pods."""

Place = tuple[str, str]


class Refusal(Exception):
    """The API server will not do this: the object is not there, is another, or has moved on."""


class ModelCluster(ABC):
    def __init__(self, owner: Manifest) -> None:
        self.now = NOW
        self.objects: dict[Place, Manifest] = {}
        self.certificates: dict[str, CertificateFacts] = {}
        self.warnings: list[KubernetesWarning] = []
        self.events: list[Emit] = []
        self.deleted: list[Manifest] = []
        self.installation = INSTALLATION
        self.rewrite: Callable[[Manifest], Any] = lambda manifest: None  # what an admission webhook does to a request
        self.stored: dict[str, Stored] = {}
        self._uids = itertools.count(1)
        self._versions = itertools.count(100)
        self.name = owner["metadata"]["name"]
        self.namespace = owner["metadata"]["namespace"]
        self.owner: Manifest | None = copy.deepcopy(owner)

    @abstractmethod
    def observe(self) -> Surroundings:
        """Return what the operator sees."""

    @abstractmethod
    def decide(self) -> Decision:
        """Return what the operator would do now."""

    @abstractmethod
    def cluster_works(self) -> None:
        """Let everything but the operator and people do its work once."""

    # --- what the operator does

    def operate(self, most_actions: int | None = None) -> tuple[Action, ...]:
        """One reconcile; `most_actions` is where the operator dies in it. Returns what it did."""
        if self.owner is None:
            return ()
        done = []
        for action in self.decide().actions[:most_actions]:
            try:
                self.do(action)
            except Refusal:
                break
            done.append(action)
        return tuple(done)

    def do(self, action: Action) -> None:
        match action:
            case Create(manifest):
                self._create(self._admitted(manifest))
                self._answer(manifest)
            case Apply(manifest, uid, resource_version):
                self._apply(self._admitted(manifest), uid, resource_version)
                self._answer(manifest)
            case Annotate():
                self._annotate(action)
            case Delete(kind, name, uid):
                self._delete((kind, name), uid)
            case IssueCertificate():
                self._issue(action)
            case WriteStatus(status):
                # A server-side apply keeps the fields of other managers.
                kept = {
                    name: text for name, text in (self.owner or {}).get("status", {}).items() if name == "wantedTime"
                }
                self._change_owner(lambda owner: owner.update(status={**copy.deepcopy(status), **kept}))
            case AddFinalizer(name):
                self._change_owner(lambda owner: owner["metadata"].setdefault("finalizers", []).append(name))
            case RemoveFinalizer(name):
                self._change_owner(lambda owner: owner["metadata"]["finalizers"].remove(name))
                self._collect_owner()
            case Emit():
                self.events.append(action)

    def get(self, kind: str, name: str) -> Manifest | None:
        """Return the object as the operator's cache holds it."""
        found = self.objects.get((kind, name))
        return trimmed(copy.deepcopy(found)) if found is not None else None

    def add(self, manifest: Manifest) -> Manifest:
        """Add an object of any owner."""
        place = (manifest["kind"], manifest["metadata"]["name"])
        if place in self.objects:
            raise Refusal(f"{place} is there already")
        live = copy.deepcopy(manifest)
        live["metadata"] |= {"uid": f"uid-{next(self._uids)}", "resourceVersion": self._version(), "generation": 1}
        live["metadata"] |= {"creationTimestamp": format_time(self.now)}
        live["metadata"].setdefault("namespace", self.namespace)
        if live["kind"] == "PersistentVolumeClaim":
            live["status"] = {"phase": "Pending"}
        self.objects[place] = live
        return live

    def _create(self, manifest: Manifest) -> None:
        self.add(manifest)

    def _apply(self, manifest: Manifest, uid: str, resource_version: str) -> None:
        live = self.objects.get((manifest["kind"], manifest["metadata"]["name"]))
        if live is None or live["metadata"]["uid"] != uid or live["metadata"]["resourceVersion"] != resource_version:
            raise Refusal("another object, or another version of it")
        wanted = copy.deepcopy(manifest)
        metadata = live["metadata"]
        kept = {name: text for name, text in metadata.get("annotations", {}).items() if name not in PIN_ANNOTATIONS}
        # What others wrote has become ours, and is gone where we do not want it.
        metadata.pop("managedFields", None)
        metadata["annotations"] = kept | wanted["metadata"].pop("annotations", {})
        metadata |= wanted["metadata"]
        metadata["resourceVersion"] = self._version()
        if "spec" in wanted and wanted["spec"] != live.get("spec"):
            live["spec"] = wanted["spec"]
            metadata["generation"] += 1

    def _annotate(self, action: Annotate) -> None:
        live = self.objects.get((action.kind, action.name))
        if live is None or live["metadata"]["resourceVersion"] != action.resource_version:
            raise Refusal("another version of it")
        live["metadata"].setdefault("annotations", {}).update(action.annotations)
        self.rewrite(live)
        live["metadata"]["resourceVersion"] = self._version()
        if action.desired is not None:
            self._answer(action.desired)

    def _admitted(self, manifest: Manifest) -> Manifest:
        admitted = copy.deepcopy(manifest)
        self.rewrite(admitted)
        return admitted

    def _answer(self, identity: Manifest) -> None:
        """Return the object as the operator remembers it."""
        live = self.get(identity["kind"], identity["metadata"]["name"])
        assert live is not None
        self.stored = with_answer(self.stored, identity, live)

    def _delete(self, place: Place, uid: str) -> None:
        if self.owner is not None and place == (self.owner["kind"], self.name):
            self.user_deletes_owner()
            return
        live = self.objects.get(place)
        if live is None:
            return
        if live["metadata"]["uid"] != uid:
            raise Refusal("another object")
        self.deleted.append(copy.deepcopy(live))
        if place[0] in {"Pod", "PersistentVolumeClaim"}:
            live["metadata"].setdefault("deletionTimestamp", format_time(self.now + timedelta(seconds=60)))
            live["metadata"]["resourceVersion"] = self._version()
        else:
            del self.objects[place]

    def _issue(self, action: IssueCertificate) -> None:
        if action.uid is None:
            live = self.add({**self._admitted(action.manifest), "data": {}})
        else:
            assert action.resource_version is not None
            self._apply(self._admitted(action.manifest), action.uid, action.resource_version)
            live = self.objects["Secret", action.manifest["metadata"]["name"]]
        self._answer(action.manifest)
        facts = CertificateFacts(
            self.now, self.now + LEAF_LIFE, action.dns_names, AUTHORITY, authority_not_after=AUTHORITY_END
        )
        self.certificates[live["metadata"]["uid"]] = facts

    def _change_owner(self, change: Callable[[Manifest], Any]) -> None:
        if self.owner is None:
            raise Refusal("the owner is gone")
        change(self.owner)
        self.owner["metadata"]["resourceVersion"] = self._version()

    def _version(self) -> str:
        return str(next(self._versions))

    # --- what others do

    def change_installation(self, **changes: Any) -> None:
        self.installation = replace(self.installation, **changes)

    def user_sets(self, **spec: Any) -> None:
        if self.owner is not None and self.owner["spec"] != self.owner["spec"] | spec:
            self._change_owner(lambda owner: owner["spec"].update(copy.deepcopy(spec)))
            self.owner["metadata"]["generation"] += 1

    def user_annotates(self, name: str, value: str | None) -> None:
        """Annotate the object as its owner. None takes the annotation away."""

        def change(owner: Manifest) -> None:
            annotations = owner["metadata"].setdefault("annotations", {})
            annotations.pop(name, None)
            if value is not None:
                annotations[name] = value

        if self.owner is not None:
            self._change_owner(change)

    def a_server_wants_it(self, value: str) -> None:
        """Write a wake request, as an API server does."""
        if self.owner is not None:
            self._change_owner(lambda owner: owner.setdefault("status", {}).update(wantedTime=value))

    def user_replaces_owner_and_orphans_its_children(self) -> None:
        """`kubectl delete --cascade=orphan`, and the same owner applied again."""
        assert self.owner is not None
        old = self.owner["metadata"]["uid"]
        for live in self.objects.values():
            references = live["metadata"].get("ownerReferences", [])
            live["metadata"]["ownerReferences"] = [each for each in references if each["uid"] != old]
        kept = {name: self.owner["metadata"][name] for name in ("name", "namespace")}
        metadata = {**kept, "uid": f"{old}-again", "resourceVersion": self._version(), "generation": 1}
        self.owner = {**{name: part for name, part in self.owner.items() if name != "status"}, "metadata": metadata}

    def user_deletes_owner(self) -> None:
        if self.owner is not None:
            self.owner["metadata"].setdefault("deletionTimestamp", format_time(self.now))
            self._collect_owner()

    @abstractmethod
    def person_edits(self, place: Place) -> None:
        """Edit what a person can reach there."""

    def person_deletes(self, place: Place) -> None:
        if place in self.objects:
            self._delete(place, self.objects[place]["metadata"]["uid"])

    def time_passes(self, span: timedelta) -> None:
        self.now += span

    def collector_works(self) -> None:
        """Objects whose owner is gone go too."""
        owners = {live["metadata"]["uid"] for live in self.objects.values()}
        owners |= {self.owner["metadata"]["uid"]} if self.owner is not None else set()
        for place, live in list(self.objects.items()):
            references = live["metadata"].get("ownerReferences", [])
            if references and not any(owner["uid"] in owners for owner in references):
                self._delete(place, live["metadata"]["uid"])

    def settle(self, rounds: int = 60) -> None:
        """Let all parts work until none has work left. Raises AssertionError when they do not come to rest."""
        for _ in range(rounds):
            before = copy.deepcopy((self.owner, self.objects, self.certificates))
            acted = self.operate()
            self.cluster_works()
            if acted or before != (self.owner, self.objects, self.certificates):
                continue
            seconds = self.decide().requeue_after_seconds if self.owner is not None else None
            if seconds is None or seconds > SOON_SECONDS:
                return
            self.time_passes(timedelta(seconds=seconds))
        raise AssertionError(f"never at rest; the latest actions: {acted}")

    # ---

    def _collect_owner(self) -> None:
        assert self.owner is not None
        metadata = self.owner["metadata"]
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            self.owner = None

    def _of_kind(self, kind: str) -> list[Manifest]:
        return [live for place, live in self.objects.items() if place[0] == kind]

    def _controls(self, workload: Manifest, pod: Manifest) -> bool:
        owners = pod["metadata"].get("ownerReferences", [])
        return any(owner["uid"] == workload["metadata"]["uid"] for owner in owners)
