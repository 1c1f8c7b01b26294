"""Kubernetes Events about sessions and pools, which `kubectl describe` shows."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime

from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.api.names import API_VERSION, MANAGER
from tinsmith_operator.api.owner import Owner, Reconciled
from tinsmith_operator.common.actions import Emit
from tinsmith_operator.common.observed import KubernetesWarning
from tinsmith_operator.errors import AlreadyExists, ClusterError, Conflict, NotFound, Refused
from tinsmith_operator.kube.client import Cluster, shortened
from tinsmith_operator.kube.resources import EVENTS
from tinsmith_operator.logs import get_logger

LONGEST_MESSAGE_BYTES = 1024
LONGEST_INSTANCE_BYTES = 128
# The interval at which the warnings of a namespace are read. It does not depend on the number of waiting sessions.
WARNINGS_SECONDS = 15.0
# How long the warnings of a namespace are kept if no owner reads them. The namespace may be gone.
FORGET_SECONDS = 20 * 60.0

log = get_logger(__name__)


class Events:
    """A writer of the operator's Events, and a reader of the warnings of other components.

    The name of an Event is derived from its owner and its text. If the same Event is emitted again, only the count of
    the existing Event is raised. The count does not change if the Event is about the same version of the owner, because
    another operator made the same decision.
    """

    def __init__(
        self, cluster: Cluster, identity: str, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._cluster = cluster
        self._identity = identity
        self._clock = clock
        self._read: dict[str, tuple[float, tuple[KubernetesWarning, ...]]] = {}

    async def emit(self, owner: Reconciled, event: Emit) -> None:
        """Write the Event.

        Raises NotLeading and Unavailable. Other failures are only logged, because nothing depends on Events.
        """
        manifest = self._manifest(owner, event)
        try:
            try:
                await self._cluster.create(EVENTS, manifest)
            except AlreadyExists:
                await self._count(owner, manifest)
        except (Conflict, NotFound, Refused) as error:
            log.warning("event not written", reason=event.reason, error=str(error))

    async def _count(self, owner: Reconciled, manifest: Manifest) -> None:
        """Increase the count of the existing Event."""
        live = await self._cluster.get(EVENTS, owner.namespace, manifest["metadata"]["name"])
        version = {"resourceVersion": owner.resource_version}
        if (live.get("involvedObject") or {}).get("resourceVersion") == owner.resource_version:
            log.debug("event already written", reason=manifest["reason"])
            return
        again = {"count": int(live.get("count") or 1) + 1, "lastTimestamp": manifest["lastTimestamp"]}
        await self._cluster.merge(EVENTS, live, {**again, "involvedObject": version})

    async def warnings(self, owner: Owner) -> tuple[KubernetesWarning, ...]:
        """Return the warnings in the owner's namespace. The warnings are at most 15 s old.

        If the API server does not return the warnings, return the latest known warnings. Old warnings do little harm,
        because warnings only explain a condition.
        """
        namespace, now = owner.namespace, asyncio.get_running_loop().time()
        read_at, known = self._read.get(namespace, (float("-inf"), ()))
        if now < read_at + WARNINGS_SECONDS:
            return known
        self._read = {name: read for name, read in self._read.items() if now < read[0] + FORGET_SECONDS}
        # Set this time before the answer arrives, so that owners reconciled at the same time send one request.
        self._read[namespace] = (now, known)
        try:
            found, _ = await self._cluster.list_all(EVENTS, namespace, field_selector="type=Warning")
        except ClusterError as error:
            log.warning("warnings not read", error=str(error))
            return known
        warnings = tuple(parse_warning(event) for event in found)
        self._read[namespace] = (now, warnings)
        return warnings

    def _manifest(self, owner: Reconciled, event: Emit) -> Manifest:
        message = shortened(event.message, LONGEST_MESSAGE_BYTES)
        identity = "\n".join([owner.uid, event.type, event.reason, message])
        name = f"{owner.name}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        now = self._clock()
        return {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": name, "namespace": owner.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": owner.KIND,
                "name": owner.name,
                "namespace": owner.namespace,
                "uid": owner.uid,
                "resourceVersion": owner.resource_version,
            },
            "type": event.type.value,
            "reason": event.reason,
            "message": message,
            "action": "Reconcile",
            "count": 1,
            "firstTimestamp": format_time(now),
            "lastTimestamp": format_time(now),
            "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": shortened(self._identity, LONGEST_INSTANCE_BYTES),
        }


def parse_warning(event: Manifest) -> KubernetesWarning:
    """Parse an Event. The Event may have been written through the API `v1` or `events.k8s.io/v1`."""
    series = event.get("series") or {}
    at = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    about = event["involvedObject"]
    return KubernetesWarning(
        kind=about.get("kind", ""),
        uid=about.get("uid", ""),
        reason=event.get("reason", ""),
        message=event.get("message", ""),
        at=datetime.fromisoformat(at or event["metadata"]["creationTimestamp"]),
    )
