"""An in-memory cache of the cluster. The watches fill the cache. A reconcile reads the cache and sends no request.

The cache never replaces an object by an older version. The cache stores the answer to each write immediately, and
ignores watch events that are older. After the deletion of an object, the cache ignores late answers that still contain
the object.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import GROUP, MANAGED_BY_LABEL, MANAGER
from tinsmith_operator.kube.resources import (
    BUDGETS,
    BY_KIND,
    CLAIMS,
    DEPLOYMENTS,
    GROUP_LABELS,
    JOURNAL_CLAIM,
    MODEL_CLAIM,
    PODS,
    POLICIES,
    RAY_CLUSTERS,
    RECONCILED,
    SERVICES,
    SESSIONS,
    WORKLOADS,
    Group,
    Key,
    Ref,
    Resource,
    groups_of,
    labels_of,
    ref_of,
    version_of,
)

# Late answers arrive within seconds. Fewer objects than this number are deleted in that time.
REMEMBERED_ENDS = 4096

RECONCILED_KINDS = frozenset(resource.kind for resource in RECONCILED)

# For these kinds, only the metadata of foreign objects is read. For a claim that a session uses, the UID is enough.
SEEN_FOR_THEIR_NAMES = frozenset(
    resource.kind for resource in (WORKLOADS, RAY_CLUSTERS, DEPLOYMENTS, SERVICES, POLICIES, BUDGETS, CLAIMS)
)
POD_SPEC = ("nodeName", "imagePullSecrets", "schedulingGates")
POD_STATUS = ("phase", "conditions", "containerStatuses", "reason", "message", "podIP")
# An annotation may repeat the whole object: `kubectl apply` writes one that does.
LARGE_METADATA = frozenset({"annotations", "managedFields"})

DerivedT = TypeVar("DerivedT")


class Cache:
    """The live objects.

    After a change, `enqueue` is called for each owner that has read the changed object.
    """

    def __init__(self, enqueue: Callable[[Key], None]) -> None:
        self._enqueue = enqueue
        self._objects: dict[Ref, Manifest] = {}
        self._derived: dict[Ref, dict[Callable[[Manifest], Any], Any]] = {}
        self._members: dict[Group, set[Ref]] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._readers: dict[Ref | Group, set[Key]] = {}
        self._read_by: dict[Key, set[Ref | Group]] = {}

    def read(self, ref: Ref, reader: Key) -> Manifest | None:
        """Return the object. The caller must not change the object. The reader is enqueued when the object changes."""
        self._note_reader(ref, reader)
        return self._objects.get(ref)

    def read_group(self, group: Group, reader: Key) -> list[Manifest]:
        """Return the objects of the group, by name.

        The reader is enqueued when an object of the group is added, changed or deleted.
        """
        if group.label not in (*GROUP_LABELS, JOURNAL_CLAIM, MODEL_CLAIM):
            raise AssertionError(f"objects are not grouped by {group.label}")
        self._note_reader(group, reader)
        return [self._objects[ref] for ref in sorted(self._members.get(group, ()))]

    def peek(self, ref: Ref) -> Manifest | None:
        return self._objects.get(ref)

    def derive(self, ref: Ref, function: Callable[[Manifest], DerivedT]) -> DerivedT | None:
        """Return the function's result for the object. The function is called once for each version of the object."""
        manifest = self._objects.get(ref)
        if manifest is None:
            return None
        derived = self._derived.setdefault(ref, {})
        if function not in derived:
            derived[function] = function(manifest)
        result: DerivedT = derived[function]
        return result

    def forget_reader(self, reader: Key) -> None:
        """Delete the record of the objects that an owner has read.

        Call this method before the owner reads again, and when the owner is gone.
        """
        for place in self._read_by.pop(reader, set()):
            readers = self._readers[place]
            readers.discard(reader)
            if not readers:
                del self._readers[place]

    def reconciled(self) -> list[Key]:
        return [Key(ref.namespace, ref.name, ref.kind) for ref in self._objects if ref.kind in RECONCILED_KINDS]

    def of_kind(self, kind: str) -> Iterable[Manifest]:
        return [manifest for ref, manifest in self._objects.items() if ref.kind == kind]

    def note(self, manifest: Manifest) -> bool:
        """Store an object from a watch, a write or a read.

        Return False if the cache has this version or a newer version.
        """
        ref, uid = ref_of(manifest), manifest["metadata"]["uid"]
        known = self._objects.get(ref)
        version = version_of(manifest)
        if version < self._ended.get(uid, 0) or (known is not None and version <= version_of(known)):
            return False
        kept = trimmed(manifest)
        self._put(ref, kept)
        if known is None or not _has_only_new_progress(known, kept):
            self._enqueue_readers(ref, known, manifest)
        return True

    def note_end(self, ref: Ref, uid: str, version: int) -> None:
        """Remove an object that left the watch at that version, unless the cache holds another object with that name.

        An object that left the watch may still exist, without the label that the watch selects. If the object still
        exists, a read returns that version or a newer version.
        """
        self._ended[uid] = version
        while len(self._ended) > REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        known = self._objects.get(ref)
        if known is not None and known["metadata"]["uid"] == uid:
            self._remove(ref)
            self._enqueue_readers(ref, known)

    def note_listed(self, listed: Iterable[Manifest], list_version: int) -> set[Ref]:
        """Store a page of a list, and return its objects.

        An object in the list exists at the version of the list, even if the cache has recorded a deletion of this
        object.
        """
        present = set()
        for manifest in listed:
            present.add(ref_of(manifest))
            uid = manifest["metadata"]["uid"]
            if self._ended.get(uid, list_version + 1) <= list_version:
                del self._ended[uid]
            self.note(manifest)
        return present

    def drop_unlisted(self, resource: Resource, namespace: str | None, present: set[Ref], list_version: int) -> None:
        """Remove each object that is missing from a complete list, except objects that are newer than the list."""
        for ref, manifest in list(self._objects.items()):
            listable = ref.kind == resource.kind and namespace in (None, ref.namespace) and resource.selects(manifest)
            if listable and ref not in present and version_of(manifest) <= list_version:
                self.note_end(ref, manifest["metadata"]["uid"], version_of(manifest) + 1)

    def drop_kind(self, resource: Resource, namespace: str | None) -> None:
        """Remove all objects of a kind that is unknown to the cluster, in one namespace or in all namespaces."""
        self.drop_unlisted(resource, namespace, set(), sys.maxsize)

    def drop_if_unwatched(self, ref: Ref) -> None:
        """Remove an object that was read once and that no watch keeps up to date."""
        manifest = self._objects.get(ref)
        if manifest is not None and not BY_KIND[ref.kind].selects(manifest):
            self._remove(ref)
            self._enqueue_readers(ref, manifest)

    def _put(self, ref: Ref, manifest: Manifest) -> None:
        if ref in self._objects:
            self._remove(ref)
        self._objects[ref] = manifest
        for group in groups_of(manifest):
            self._members.setdefault(group, set()).add(ref)

    def _remove(self, ref: Ref) -> None:
        self._derived.pop(ref, None)
        for group in groups_of(self._objects.pop(ref)):
            self._members[group].discard(ref)
            if not self._members[group]:
                del self._members[group]

    def _note_reader(self, place: Ref | Group, reader: Key) -> None:
        self._readers.setdefault(place, set()).add(reader)
        self._read_by.setdefault(reader, set()).add(place)

    def _enqueue_readers(self, ref: Ref, *versions: Manifest | None) -> None:
        """Enqueue the readers of an object.

        `versions`: the object before and after the change, or None where it did not exist.
        """
        concerned = set(self._readers.get(ref, ()))
        for manifest in filter(None, versions):
            for group in groups_of(manifest):
                concerned |= self._readers.get(group, set())
        if ref.kind in RECONCILED_KINDS:
            concerned.add(Key(ref.namespace, ref.name, ref.kind))
        for key in concerned:
            self._enqueue(key)


def _has_only_new_progress(known: Manifest, manifest: Manifest) -> bool:
    """Return whether only the training progress of a session has changed, which no reconcile reads."""
    if manifest["kind"] != SESSIONS.kind:
        return False
    before, after = known.get("status") or {}, manifest.get("status") or {}
    if before.get("progress") == after.get("progress"):
        return False
    return _without_progress(known, before) == _without_progress(manifest, after)


def _without_progress(manifest: Manifest, status: Manifest) -> Manifest:
    """Return the session without its progress, and without the version that each write changes."""
    metadata = _without(manifest["metadata"], {"resourceVersion"})
    return {**manifest, "metadata": metadata, "status": _without(status, {"progress"})}


def trimmed(manifest: Manifest) -> Manifest:
    """Return the part of an object that the operator needs.

    A cluster may contain many foreign objects. Only the metadata of a foreign object is kept.
    """
    kept: Manifest = _shared(_needed(manifest))
    return kept


def _shared(value: Any) -> Any:
    """Return the value with texts that all objects share. Most texts of a thousand sessions are the same."""
    if isinstance(value, dict):
        return {sys.intern(name): _shared(content) for name, content in value.items()}
    if isinstance(value, list):
        return [_shared(item) for item in value]
    return sys.intern(value) if isinstance(value, str) else value


def _needed(manifest: Manifest) -> Manifest:
    if manifest["kind"] == PODS.kind:
        return _pod(manifest)
    if manifest["kind"] in RECONCILED_KINDS:
        return {**manifest, "metadata": _without(manifest["metadata"], {"managedFields"})}
    if manifest["kind"] in SEEN_FOR_THEIR_NAMES and not _concerns_us(manifest):
        return _name_alone(manifest)
    managed = manifest["metadata"].get("managedFields")
    if managed is None:
        return manifest
    return {**manifest, "metadata": {**manifest["metadata"], "managedFields": summarized(managed)}}


def summarized(managed: Iterable[Manifest]) -> list[Manifest]:
    """Return the managers of an object with the names of the fields in its spec, without the fields below.

    These names show which other managers have written into the object. All managed fields would take as much memory as
    the rest of the object.
    """
    return [
        {
            **_only(entry, ("manager", "operation")),
            "fieldsV1": {part: {name: {} for name in fields} for part, fields in (entry.get("fieldsV1") or {}).items()},
        }
        for entry in managed
        if not entry.get("subresource")
    ]


def _name_alone(manifest: Manifest) -> Manifest:
    """Return the metadata with the operator's annotations.

    Annotations on the claim of a session pin the image.
    """
    metadata = _without(manifest["metadata"], LARGE_METADATA)
    annotations = manifest["metadata"].get("annotations") or {}
    own_annotations = {name: text for name, text in annotations.items() if name.startswith(f"{GROUP}/")}
    managed = manifest["metadata"].get("managedFields") or ()
    own = summarized(entry for entry in managed if entry.get("manager") == MANAGER)
    kept = {**({"annotations": own_annotations} if own_annotations else {}), **({"managedFields": own} if own else {})}
    identity = {name: value for name, value in manifest.items() if name in ("apiVersion", "kind")}
    return {**identity, "metadata": {**metadata, **kept}}


def _pod(manifest: Manifest) -> Manifest:
    metadata = _without(manifest["metadata"], LARGE_METADATA)
    annotations = manifest["metadata"].get("annotations") or {}
    own_annotations = {name: text for name, text in annotations.items() if name.startswith(f"{GROUP}/")}
    spec, status = manifest.get("spec") or {}, manifest.get("status") or {}
    mounted = [volume for volume in spec.get("volumes") or () if "persistentVolumeClaim" in volume]
    return {
        "apiVersion": manifest.get("apiVersion", PODS.api_version),
        "kind": manifest["kind"],
        "metadata": {**metadata, **({"annotations": own_annotations} if annotations else {})},
        "spec": {
            **_only(spec, POD_SPEC),
            **({"containers": [_container(each) for each in spec["containers"]]} if "containers" in spec else {}),
            **({"volumes": mounted} if mounted else {}),
        },
        "status": _only(status, POD_STATUS),
    }


def _container(container: Manifest) -> Manifest:
    """Return the parts of the container that the operator needs, including the argument with the name of the image."""
    image = [each for each in container.get("args") or () if each.startswith("--image=")]
    return {**_only(container, ("name", "image")), **({"args": image} if image else {})}


def _only(content: Manifest, fields: Iterable[str]) -> Manifest:
    return {name: content[name] for name in fields if name in content}


def _without(content: Manifest, fields: Collection[str]) -> Manifest:
    return {name: value for name, value in content.items() if name not in fields}


def _concerns_us(manifest: Manifest) -> bool:
    """Return whether an object has the operator's label or owner reference.

    The label or the owner reference of a child may be missing.
    """
    if labels_of(manifest).get(MANAGED_BY_LABEL) == MANAGER:
        return True
    owners = manifest["metadata"].get("ownerReferences") or ()
    return any(str(owner.get("apiVersion")).startswith(f"{GROUP}/") for owner in owners)
