"""Families: sessions and pools, together with the objects that belong to a session or pool."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from tinsmith.cluster.kubectl import Forbidden, KindUnknown, Kubectl, Misused, NotFound
from tinsmith.cluster.manifests import Manifest, label_of, name_of, namespace_of, uid_of

GROUP = "tinsmith.dev"

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
OPERATOR = "tinsmith-operator"

MEMBER_APPLICATION = "tinsmith-worker-member"
"""The label `app.kubernetes.io/name` of the pods of a session with several nodes, except for the worker's pod."""

CONVERSION_APPLICATION = "tinsmith-conversion"
"""The label `app.kubernetes.io/name` of the pods of the Job that converts a session's model."""

INSTALLATION_SELECTOR = "app.kubernetes.io/name=tinsmith"
"""The selector of the objects that the chart installs: the operator, the API server, and other objects."""

SNAPSHOT_REQUEST = f"{GROUP}/snapshot-requested-at"
RESTART_REQUEST = f"{GROUP}/restart-requested-at"
WAKE_REQUEST = f"{GROUP}/wake-requested-at"


class Kind(Enum):
    """A kind of resource: TrainingSession or SamplerPool.

    `word` is the short name of the kind, as in `session/NAME` and `pool/NAME`.
    """

    SESSION = ("TrainingSession", "trainingsessions", "session", frozenset({"StatefulSet", "RayCluster"}))
    POOL = ("SamplerPool", "samplerpools", "pool", frozenset({"Deployment"}))

    def __init__(self, kind: str, plural: str, word: str, workloads: frozenset[str]) -> None:
        self.kind = kind
        self.resource = f"{plural}.{GROUP}"
        self.word = word
        self.workloads = workloads
        """The kinds of workloads that run the pods of the resource."""
        self.label = f"{GROUP}/{word}"
        """The label of each child. The value of the label is the name of the resource."""

    @property
    def spellings(self) -> frozenset[str]:
        """Return the names of the kind that a user may write before the slash."""
        plural = self.resource.partition(".")[0]
        return frozenset({self.word, self.kind.lower(), plural, self.resource, f"{self.kind.lower()}.{GROUP}"}) | (
            {"tsess"} if self is Kind.SESSION else {"spool"}
        )


CHILDREN = ("pods", "statefulsets.apps", "deployments.apps", "replicasets.apps", "persistentvolumeclaims")
"""The kinds of objects that belong to a family. Secrets are left out, so users need no right to read Secrets."""

MANAGED_BY_OPERATOR = f"{MANAGED_BY_LABEL}={OPERATOR}"


@dataclass(frozen=True)
class Family:
    """A session or pool, with all objects that belong to it.

    `workload` is the StatefulSet, RayCluster or Deployment. `pods` begins with a session's worker. Before the worker
    exists, `pods` begins with the unfinished conversion pods, newest first. `claim` is the claim for a session's
    journal.
    """

    kind: Kind
    owner: Manifest
    workload: Manifest | None = None
    pods: tuple[Manifest, ...] = ()
    replica_sets: tuple[Manifest, ...] = ()
    claim: Manifest | None = None

    @property
    def name(self) -> str:
        return name_of(self.owner)

    @property
    def namespace(self) -> str:
        return namespace_of(self.owner)

    @property
    def title(self) -> str:
        """Return the name for messages."""
        return f"{self.kind.kind} {self.name}"

    @property
    def pod_uids(self) -> frozenset[str]:
        return frozenset(map(uid_of, self.pods))

    @property
    def members(self) -> tuple[Manifest, ...]:
        """Return the owner and all known children."""
        single = (self.workload, self.claim)
        return (self.owner, *(found for found in single if found is not None), *self.replica_sets, *self.pods)


@dataclass(frozen=True)
class Seen:
    """The families, and a message for each kind of object that could not be read."""

    families: tuple[Family, ...]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """The session or pool that the user named. `kind` is None if the user gave only the name."""

    name: str
    kind: Kind | None = None


def parse_target(text: str) -> Target:
    """Parse NAME, session/NAME or pool/NAME. Raises Misused for any other text."""
    word, slash, name = text.rpartition("/")
    if not slash:
        return Target(text)
    kind = next((kind for kind in Kind if word.lower() in kind.spellings), None)
    if kind is None or not name:
        raise Misused(f"{text} is neither NAME nor session/NAME nor pool/NAME; write one of them.")
    return Target(name, kind)


def choose(families: Sequence[Family], target: Target) -> Family:
    """Return the family that the target names.

    Raises NotFound if no family has the name, and Misused if both a session and a pool have the name.
    """
    found = [family for family in families if family.name == target.name and target.kind in (None, family.kind)]
    if not found:
        kinds = [target.kind] if target.kind is not None else list(Kind)
        kinds_text = " or ".join(kind.kind for kind in kinds)
        raise NotFound(f"There is no {kinds_text} {target.name} here; `kubectl tinsmith status -A` lists all of them.")
    if len(found) > 1:
        choices = " or ".join(f"{family.kind.word}/{family.name}" for family in found)
        raise Misused(f"A TrainingSession and a SamplerPool are named {target.name}; write {choices}.")
    return found[0]


def read_families(kubectl: Kubectl) -> Seen:
    """Return all families of the chosen namespaces, and a message for each kind that the user may not read."""
    owners = _read_owners(kubectl)
    if not any(owners.values()):
        return Seen(())
    children, unread = list_readable(kubectl, CHILDREN, MANAGED_BY_OPERATOR)
    if any(_nodes(session) > 1 for session in owners[Kind.SESSION]):
        clusters, unread_clusters = _ray_clusters(kubectl)
        children, unread = children + clusters, unread + unread_clusters
    children += _adopted_claims(kubectl, owners[Kind.SESSION], children)
    return Seen(assemble(owners, children), tuple(unread))


def read_family(kubectl: Kubectl, target: Target) -> tuple[Family, tuple[str, ...]]:
    """Return the family that the target names, and a message for each part of the family that could not be read."""
    seen = read_families(kubectl)
    return choose(seen.families, target), seen.unread


def _read_owners(kubectl: Kubectl) -> dict[Kind, list[Manifest]]:
    """Return all sessions and pools.

    Raises KindUnknown if the cluster knows neither TrainingSessions nor SamplerPools.
    """
    owners: dict[Kind, list[Manifest]] = {}
    unknown: KindUnknown | None = None
    for kind in Kind:
        try:
            owners[kind] = kubectl.find(kind.resource)
        except KindUnknown as error:
            unknown = unknown or error
    if not owners and unknown is not None:
        raise unknown
    return {kind: owners.get(kind, []) for kind in Kind}


def list_readable(kubectl: Kubectl, resources: Sequence[str], selector: str | None) -> tuple[list[Manifest], list[str]]:
    """List all kinds in one request.

    If the user may not read some kind, list each kind separately, and return a message for each forbidden kind.
    """
    try:
        return kubectl.find(",".join(resources), selector), []
    except Forbidden:
        pass
    items: list[Manifest] = []
    unread = []
    for resource in resources:
        try:
            items += kubectl.find(resource, selector)
        except Forbidden as error:
            unread.append(f"{resource.partition('.')[0]} not shown: {error}")
    return items, unread


def effective_spec(owner: Manifest) -> Manifest:
    """Return the spec by which a session or pool runs: its own, or the copy of its template in the status."""
    own: Manifest = owner["spec"]
    copy = (owner.get("status") or {}).get("template")
    return {**json.loads(copy["spec"]), **own} if copy is not None and "templateRef" in own else own


def _nodes(session: Manifest) -> int:
    nodes: int = (effective_spec(session).get("parallelism") or {}).get("nodes", 1)
    return nodes


def _ray_clusters(kubectl: Kubectl) -> tuple[list[Manifest], list[str]]:
    """Return the RayClusters, or none if KubeRay is not installed.

    The conditions of a session report a missing KubeRay.
    """
    try:
        return list_readable(kubectl, ("rayclusters.ray.io",), MANAGED_BY_OPERATOR)
    except KindUnknown:
        return [], []


def _adopted_claims(kubectl: Kubectl, sessions: list[Manifest], children: list[Manifest]) -> list[Manifest]:
    """Return the claims that users created. Claims that users created do not have the label of the operator."""
    known = {(namespace_of(child), name_of(child)) for child in children if child["kind"] == "PersistentVolumeClaim"}
    claims = []
    for session in sessions:
        named = (effective_spec(session).get("storage") or {}).get("existingClaim")
        if named and (namespace_of(session), named) not in known:
            try:
                claims.append(kubectl.within(namespace_of(session)).get("persistentvolumeclaims", named))
            except (Forbidden, NotFound):
                # The session's condition reports that it is missing.
                continue
    return claims


def assemble(owners: dict[Kind, list[Manifest]], children: Iterable[Manifest]) -> tuple[Family, ...]:
    """Assign each child to the owner in the same namespace that the child's label names."""
    listed = list(children)
    return tuple(_family(kind, owner, listed) for kind in Kind for owner in owners[kind])


def _family(kind: Kind, owner: Manifest, children: list[Manifest]) -> Family:
    here = [child for child in children if namespace_of(child) == namespace_of(owner)]
    children = [child for child in here if label_of(child, kind.label) == name_of(owner)]
    return Family(
        kind=kind,
        owner=owner,
        workload=_first(children, lambda child: child["kind"] in kind.workloads),
        pods=_pods([child for child in children if child["kind"] == "Pod"]),
        replica_sets=tuple(child for child in children if child["kind"] == "ReplicaSet"),
        claim=_first(here, lambda child: _is_claim_of(child, owner)) if kind is Kind.SESSION else None,
    )


def _pods(pods: list[Manifest]) -> tuple[Manifest, ...]:
    converters = [pod for pod in pods if label_of(pod, "app.kubernetes.io/name") == CONVERSION_APPLICATION]
    if len(converters) == len(pods):
        phased = [pod for pod in pods if (pod.get("status") or {}).get("phase") != "Succeeded"]
        return tuple(sorted(phased, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), reverse=True))
    return tuple(sorted((pod for pod in pods if pod not in converters), key=_worker_first))


def _worker_first(pod: Manifest) -> tuple[bool, str]:
    return label_of(pod, "app.kubernetes.io/name") == MEMBER_APPLICATION, name_of(pod)


def _is_claim_of(child: Manifest, session: Manifest) -> bool:
    named = (effective_spec(session).get("storage") or {}).get("existingClaim") or f"{name_of(session)}-journal"
    return bool(child["kind"] == "PersistentVolumeClaim" and name_of(child) == named)


def _first(found: list[Manifest], fits: Callable[[Manifest], bool]) -> Manifest | None:
    return next((manifest for manifest in found if fits(manifest)), None)
