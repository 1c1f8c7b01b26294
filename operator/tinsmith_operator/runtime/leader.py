"""Leader election by a Lease. One operator acts while the other operators wait.

A leader that cannot renew the Lease stops acting before another operator may start. The leader counts from the time
when it *sent* its last successful renewal, and stops after two thirds of the duration of the Lease. Each other operator
counts the whole duration from the later time when it *saw* that renewal. Each operator measures durations with its own
monotonic clock. The times in the Lease itself are only information for people.

The Lease cannot stop the write of a process that was frozen between the check and the write. A late write does no harm,
because the write names the version of the object (`kube/client.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.errors import AlreadyExists, ClusterError, Conflict, NotFound, NotLeading
from tinsmith_operator.kube.resources import LEASES
from tinsmith_operator.logs import get_logger

ACTING_SHARE = 2 / 3
RENEW_SHARE = 1 / 5
# A waiting operator counts from the moment when it saw the last renewal. So rare reads delay the next leader.
LOOK_SHARE = 1 / 10

WriteLease = Callable[[Manifest, float], Awaitable[Manifest]]
ReadLease = Callable[[], Awaitable[Manifest]]

log = get_logger(__name__)


class Leader:
    """A participant in the election.

    `changed` is called when this operator becomes the leader or stops being the leader.

    `renew_seconds` is the time between two renewals; None stands for a fifth of the duration of the Lease.
    """

    def __init__(
        self,
        read: ReadLease,
        write: WriteLease,
        *,
        namespace: str,
        name: str,
        identity: str,
        lease_seconds: int,
        renew_seconds: float | None = None,
        changed: Callable[[bool], None],
    ) -> None:
        self._read = read
        self._write = write
        self._namespace = namespace
        self._name = name
        self.identity = identity
        self._lease_seconds = lease_seconds
        self._renew_seconds = renew_seconds if renew_seconds is not None else lease_seconds * RENEW_SHARE
        self._changed = changed
        self._held: Manifest | None = None
        self._renewed_at = float("-inf")
        self._seen: tuple[Any, ...] | None = None
        self._free_at = 0.0
        self._announced = False

    @property
    def is_leading(self) -> bool:
        return _now() < self._renewed_at + self._lease_seconds * ACTING_SHARE

    def permit(self) -> float:
        """Return the number of seconds that a write may still take. Raises NotLeading."""
        if not self.is_leading:
            raise NotLeading(f"This operator has lost the Lease {self._namespace}/{self._name}.")
        return self._renewed_at + self._lease_seconds - _now()

    async def run(self) -> None:
        """Acquire the Lease when the Lease is free, and renew the Lease. Run until cancelled."""
        while True:
            try:
                await self._step()
            except ClusterError as error:
                log.warning("lease not renewed", lease=self._name, error=str(error))
            self._announce()
            await asyncio.sleep(self._seconds_to_next_step())

    async def release(self) -> None:
        """Free the Lease, so that another operator can start at once. Call this method after the last write."""
        held, self._held, self._renewed_at = self._held, None, float("-inf")
        self._announce()
        if held is None:
            return
        free = {**held, "spec": {**held["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}}
        try:
            await self._write(free, self._lease_seconds * ACTING_SHARE)
        except ClusterError as error:
            log.warning("lease not released; it expires by itself", lease=self._name, error=str(error))

    async def _step(self) -> None:
        try:
            if self._held is not None:
                await self._hold({**self._held, "spec": {**self._held["spec"], "renewTime": _timestamp()}})
            else:
                await self._try_to_take()
        except (Conflict, AlreadyExists, NotFound):
            # Another operator wrote the Lease in the meantime, and the next step reads it.
            self._held = None

    async def _try_to_take(self) -> None:
        try:
            lease = await self._read()
        except NotFound:
            await self._hold(self._taken(None))
            return
        if self._is_free(lease):
            await self._hold(self._taken(lease))

    def _seconds_to_next_step(self) -> float:
        """Return the seconds to the next step.

        A waiting operator reads the Lease at the moment when the Lease expires.
        """
        if self._held is not None:
            return self._renew_seconds
        look = self._lease_seconds * LOOK_SHARE
        left = self._free_at - _now()
        return left if 0 < left < look else look

    def _is_free(self, lease: Manifest) -> bool:
        """Return whether the Lease is free: without a holder, held by this identity, or expired."""
        spec = lease.get("spec") or {}
        record = (spec.get("holderIdentity"), spec.get("renewTime"), lease["metadata"]["uid"])
        if record != self._seen:
            self._seen = record
            self._free_at = _now() + spec.get("leaseDurationSeconds", self._lease_seconds)
        return record[0] in (None, "", self.identity) or _now() >= self._free_at

    async def _hold(self, lease: Manifest) -> None:
        sent_at = _now()
        self._held = await self._write(lease, self._lease_seconds * ACTING_SHARE)
        self._renewed_at = sent_at

    def _taken(self, lease: Manifest | None) -> Manifest:
        """Return the Lease with this operator as the holder."""
        metadata = lease["metadata"] if lease else {"name": self._name, "namespace": self._namespace}
        transitions = (lease.get("spec") or {}).get("leaseTransitions", 0) + 1 if lease else 0
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self._lease_seconds,
            "acquireTime": _timestamp(),
            "renewTime": _timestamp(),
            "leaseTransitions": transitions,
        }
        return {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": spec}

    def _announce(self) -> None:
        if self.is_leading != self._announced:
            self._announced = self.is_leading
            log.info("leading" if self._announced else "not leading", lease=self._name, identity=self.identity)
            self._changed(self._announced)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
