"""The kinds of objects that the operator reads and writes, with the paths of these kinds in the Kubernetes API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from tinsmith_operator.api.names import (
    API_VERSION,
    JOURNAL_VOLUME,
    MANAGED_BY_LABEL,
    MANAGER,
    POOL_KIND,
    POOL_LABEL,
    POOL_PLURAL,
    SESSION_KIND,
    SESSION_LABEL,
    SESSION_PLURAL,
    TEMPLATE_KIND,
    TEMPLATE_LABEL,
    TEMPLATE_PLURAL,
    claim_name,
)
from tinsmith_operator.api.owner import effective_spec


@dataclass(frozen=True)
class Resource:
    """A kind of object. `label` is the pair (key, value) that selects the watched objects.

    If `label` is None, all objects are watched.
    """

    api_version: str
    kind: str
    plural: str
    label: tuple[str, str] | None = None

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    @property
    def label_selector(self) -> str | None:
        if self.label is None:
            return None
        key, value = self.label
        return f"{key}={value}"

    def selects(self, manifest: dict[str, Any]) -> bool:
        """Return whether a watch reports this object."""
        if self.label is None:
            return True
        key, value = self.label
        return bool(labels_of(manifest).get(key) == value)

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of an object or of a list.

        Without a namespace, return the path of the list for all namespaces.
        """
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        inside = ["namespaces", quote(namespace, safe="")] if namespace is not None else []
        parts = [root, *inside, self.plural]
        parts += [quote(name, safe="")] if name is not None else []
        parts += [subresource] if subresource is not None else []
        return "/".join(parts)


SESSIONS = Resource(API_VERSION, SESSION_KIND, SESSION_PLURAL)
POOLS = Resource(API_VERSION, POOL_KIND, POOL_PLURAL)
TEMPLATES = Resource(API_VERSION, TEMPLATE_KIND, TEMPLATE_PLURAL)
# These kinds are watched without a label. The operator must see foreign objects that have a child's name, and claims
# that a session only uses.
WORKLOADS = Resource("apps/v1", "StatefulSet", "statefulsets")
DEPLOYMENTS = Resource("apps/v1", "Deployment", "deployments")
# Jobs are watched by label, because a cluster may have many foreign Jobs.
JOBS = Resource("batch/v1", "Job", "jobs", (MANAGED_BY_LABEL, MANAGER))
SERVICES = Resource("v1", "Service", "services")
CLAIMS = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
POLICIES = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
BUDGETS = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
# KubeRay's kind, for sessions of several nodes. It is optional, and the operator watches it only when a session needs
# it.
RAY_CLUSTERS = Resource("ray.io/v1", "RayCluster", "rayclusters")
# These kinds are watched by label. Foreign Secrets must not be in memory, and there may be many foreign pods.
SECRETS = Resource("v1", "Secret", "secrets", (MANAGED_BY_LABEL, MANAGER))
PODS = Resource("v1", "Pod", "pods", (MANAGED_BY_LABEL, MANAGER))

LEASES = Resource("coordination.k8s.io/v1", "Lease", "leases")
EVENTS = Resource("v1", "Event", "events")

OWNERS = (SESSIONS, POOLS)
RECONCILED = (*OWNERS, TEMPLATES)
WATCHED = (*RECONCILED, WORKLOADS, DEPLOYMENTS, JOBS, SERVICES, CLAIMS, POLICIES, BUDGETS, SECRETS, PODS)
BY_KIND = {resource.kind: resource for resource in (*WATCHED, RAY_CLUSTERS)}


class Ref(NamedTuple):
    """The kind, namespace and name of an object."""

    kind: str
    namespace: str
    name: str


class Key(NamedTuple):
    """The key of one object that the operator reconciles. Two reconciles of the same key never run at the same time."""

    namespace: str
    name: str
    kind: str


OWNER_LABELS = (SESSION_LABEL, POOL_LABEL)
GROUP_LABELS = (*OWNER_LABELS, TEMPLATE_LABEL)
JOURNAL_CLAIM = "spec.storage"
"""The pseudo label of a group: the sessions and pods that use the same claim for a journal."""
MODEL_CLAIM = "spec.model"
"""The pseudo label of a group: the sessions and pools that use the same claim for a model or for the model cache."""


def is_of_an_owner(manifest: dict[str, Any]) -> bool:
    """Return whether an object was made for a session or pool."""
    return any(label in labels_of(manifest) for label in OWNER_LABELS)


class Group(NamedTuple):
    """The objects of one kind and namespace with this label.

    The label is one of `GROUP_LABELS` or a pseudo label for a claim.
    """

    kind: str
    namespace: str
    label: str
    value: str


def labels_of(manifest: dict[str, Any]) -> dict[str, str]:
    return manifest["metadata"].get("labels") or {}


def groups_of(manifest: dict[str, Any]) -> list[Group]:
    """Return the groups that contain an object."""
    kind, namespace, labels = manifest["kind"], manifest["metadata"]["namespace"], labels_of(manifest)
    groups = [Group(kind, namespace, label, labels[label]) for label in GROUP_LABELS if label in labels]
    groups += [Group(kind, namespace, JOURNAL_CLAIM, claim) for claim in _journal_claims(manifest)]
    return [*groups, *(Group(kind, namespace, MODEL_CLAIM, claim) for claim in _model_claims(manifest))]


def _journal_claims(manifest: dict[str, Any]) -> set[str]:
    """Return the claims that the session or pod uses for a journal.

    Other mounts of a pod do not count, because other mounts do not stop a worker.
    """
    spec = manifest.get("spec") or {}
    if manifest["kind"] == SESSION_KIND:
        storage = effective_spec(manifest).get("storage") or {}
        return {str(storage.get("existingClaim") or claim_name(manifest["metadata"]["name"]))}
    if manifest["kind"] == PODS.kind:
        journals = (volume for volume in spec.get("volumes") or () if volume.get("name") == JOURNAL_VOLUME)
        claims = (volume.get("persistentVolumeClaim") for volume in journals)
        return {str(claim["claimName"]) for claim in claims if claim and not claim.get("readOnly")}
    return set()


def _model_claims(manifest: dict[str, Any]) -> set[str]:
    if manifest["kind"] not in (SESSION_KIND, POOL_KIND):
        return set()
    spec = effective_spec(manifest)
    source = ((spec.get("model") or {}).get("source") or {}).get("persistentVolumeClaim")
    return {str(named["claimName"]) for named in (source, spec.get("modelCache")) if named}


def ref_of(manifest: dict[str, Any]) -> Ref:
    metadata = manifest["metadata"]
    return Ref(manifest["kind"], metadata["namespace"], metadata["name"])


def version_of(manifest: dict[str, Any]) -> int:
    """Return the version of an object or list as a number.

    Kubernetes 1.35 and later guarantee that the versions of one kind increase.
    """
    return int(manifest["metadata"]["resourceVersion"])


class ApiCall(NamedTuple):
    """A request in the terms of RBAC. `resource` is `discovery` for a path without objects."""

    verb: str
    resource: str
    name: str | None


VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "GET": "get"}


def namespace_of(path: str) -> str | None:
    """Return the namespace in the path of a request.

    Return None if the request covers all namespaces or no namespace.
    """
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    return unquote(rest[1]) if rest[:1] == ["namespaces"] and len(rest) > 1 else None


def parse_call(method: str, path: str, is_watch: bool) -> ApiCall:
    """Return the call of a request in the terms of RBAC.

    `/api/v1/namespaces/n/pods/p/status` is a call of `pods/status`.
    """
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    if rest[:1] == ["namespaces"]:
        rest = rest[2:]
    if not rest:
        return ApiCall("get", "discovery", None)
    name = rest[1] if len(rest) > 1 else None
    resource = "/".join([rest[0], *rest[2:3]])
    if method == "GET" and name is None:
        return ApiCall("watch" if is_watch else "list", resource, None)
    return ApiCall(VERBS[method], resource, name)
