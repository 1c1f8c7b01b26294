"""The verbs of the operator's `kube/client.py` over objects in memory, with versions, UIDs and their conflicts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

from tinsmith_operator.api.names import CONFIGURATION_ANNOTATION
from tinsmith_operator.errors import AlreadyExists, Conflict, NotFound, Refused
from tinsmith_operator.kube.resources import RECONCILED, Ref, Resource

Manifest = dict[str, Any]


class FakeCluster:
    """An API server in memory.

    `requests` are the ones that came, as (verb, kind, name). `failures` holds what the next one of a verb raises.
    rewrite: what an admission webhook does to the object that is sent.
    forbidden: namespaces in which no object may be listed. told: the plurals of our kinds that it reports.
    missing: plurals whose CRD is not installed.
    """

    def __init__(self) -> None:
        self.objects: dict[Ref, Manifest] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.failures: dict[str, list[Exception]] = {}
        self.rewrite: Callable[[Manifest], Any] = lambda manifest: None
        self.forbidden: set[str | None] = set()
        self.missing: set[str] = set()
        self.discovered = {resource.plural for resource in RECONCILED}
        self._versions = itertools.count(1)

    def put(self, manifest: Manifest) -> Manifest:
        """Write an object as another client would."""
        return self._store(manifest)

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest:
        self._begin("get", resource.kind, name)
        return copy.deepcopy(self._live(Ref(resource.kind, namespace, name)))

    async def read_lease(self, resource: Resource, namespace: str, name: str) -> Manifest:
        return await self.get(resource, namespace, name)

    async def list_all(
        self, resource: Resource, namespace: str | None, field_selector: str | None = None
    ) -> tuple[list[Manifest], int]:
        self._begin("list", resource.kind, "")
        if resource.plural in self.missing:
            raise NotFound("the server could not find the requested resource")
        if namespace in self.forbidden:
            raise Refused(f"{resource.plural} is forbidden in the namespace {namespace}")
        within = [ref for ref in self.objects if ref.kind == resource.kind and namespace in (None, ref.namespace)]
        found = [self.objects[ref] for ref in within]
        return [copy.deepcopy(item) for item in found if resource.selects(item)], next(self._versions)

    async def try_list(self, resource: Resource, namespace: str | None) -> None:
        await self.list_all(resource, namespace)

    async def list_answer(self, resource: Resource, namespace: str | None) -> Manifest:
        """Return the list as the wire has it."""
        items, version = await self.list_all(resource, namespace)
        return {"items": items, "metadata": {"resourceVersion": str(version)}}

    async def kinds_of(self, api_version: str) -> frozenset[str]:
        self._begin("get", "APIResourceList", api_version)
        return frozenset(self.discovered)

    async def create(self, resource: Resource, manifest: Manifest) -> Manifest:
        metadata = manifest["metadata"]
        self._begin("create", resource.kind, metadata["name"])
        if Ref(resource.kind, metadata["namespace"], metadata["name"]) in self.objects:
            raise AlreadyExists(f"{resource.kind} {metadata['name']} already exists")
        return self._store(self._admitted(manifest))

    async def apply(self, resource: Resource, manifest: Manifest, subresource: str | None = None) -> Manifest:
        metadata = manifest["metadata"]
        self._begin("apply", resource.kind, metadata["name"])
        live = self._guarded(resource, metadata)
        if subresource is not None:
            others = {name: part for name, part in live.get("status", {}).items() if name == "progress"}
            return self._store({**live, "status": {**manifest["status"], **others}})
        return self._store({**live, **self._admitted(manifest), "metadata": {**live["metadata"], **metadata}})

    async def apply_progress(self, resource: Resource, manifest: Manifest) -> Manifest:
        self._begin("progress", resource.kind, manifest["metadata"]["name"])
        live = self._guarded(resource, manifest["metadata"])
        return self._store({**live, "status": {**live.get("status", {}), **manifest["status"]}})

    async def own_created_fields(self, resource: Resource, manifest: Manifest, managed: list[Manifest]) -> Manifest:
        metadata = manifest["metadata"]
        self._begin("own", resource.kind, metadata["name"])
        live = self._guarded(resource, metadata)
        annotations = live["metadata"].get("annotations", {})
        unsealed = {name: text for name, text in annotations.items() if name != CONFIGURATION_ANNOTATION}
        return self._store(
            {**live, "metadata": {**live["metadata"], "managedFields": managed, "annotations": unsealed}}
        )

    async def merge(self, resource: Resource, manifest: Manifest, changes: Manifest) -> Manifest:
        self._begin("merge", resource.kind, manifest["metadata"]["name"])
        live = self._guarded(resource, manifest["metadata"])
        return self._store(_merged(live, changes))

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        uid: str,
        grace_period_seconds: int | None = None,
        resource_version: str | None = None,
    ) -> Manifest:
        self._begin("delete", resource.kind, name)
        live = self._live(Ref(resource.kind, namespace, name))
        if live["metadata"]["uid"] != uid:
            raise Conflict("the UID in the precondition is another one")
        if resource_version not in (None, live["metadata"]["resourceVersion"]):
            raise Conflict("the version in the precondition is another one")
        del self.objects[Ref(resource.kind, namespace, name)]
        return {"kind": "Status", "status": "Success"}

    def _admitted(self, manifest: Manifest) -> Manifest:
        admitted = copy.deepcopy(manifest)
        self.rewrite(admitted)
        return admitted

    def _begin(self, verb: str, kind: str, name: str) -> None:
        self.requests.append((verb, kind, name))
        if self.failures.get(verb):
            raise self.failures[verb].pop(0)

    def _live(self, ref: Ref) -> Manifest:
        if ref not in self.objects:
            raise NotFound(f"{ref.kind} {ref.name} not found")
        return self.objects[ref]

    def _guarded(self, resource: Resource, metadata: Manifest) -> Manifest:
        live = self._live(Ref(resource.kind, metadata["namespace"], metadata["name"]))
        for guard in ("uid", "resourceVersion"):
            if live["metadata"][guard] != metadata[guard]:
                raise Conflict(f"{resource.kind} {metadata['name']} has another {guard}")
        return live

    def _store(self, manifest: Manifest) -> Manifest:
        stored = copy.deepcopy(manifest)
        version = str(next(self._versions))
        stored["metadata"] = {"uid": f"uid-{version}", **stored["metadata"], "resourceVersion": version}
        metadata = stored["metadata"]
        self.objects[Ref(stored["kind"], metadata["namespace"], metadata["name"])] = stored
        return copy.deepcopy(stored)


def _merged(live: Manifest, changes: Manifest) -> Manifest:
    """Merge as RFC 7386 defines."""
    merged = {name: value for name, value in live.items() if changes.get(name, "") is not None}
    for name, value in changes.items():
        if isinstance(value, dict):
            merged[name] = _merged(merged.get(name) or {}, value)
        elif value is not None:
            merged[name] = value
    return merged
