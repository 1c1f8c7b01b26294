"""The writer of `status.progress`: at most one write a second for all sessions, after all other requests.

Each report changes the progress in memory. The writer then writes the changed progress that was written longest ago. A
write that fails is dropped, because the next report brings the progress back.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.status import TrainingProgress
from tinsmith_operator.common.observed import WorkerReport
from tinsmith_operator.errors import OperatorError, Refused
from tinsmith_operator.kube.cache import Cache
from tinsmith_operator.kube.client import Cluster
from tinsmith_operator.kube.resources import SESSIONS, Key, Ref
from tinsmith_operator.logs import get_logger
from tinsmith_operator.session.progress import next_progress, stopped_progress

PERIOD_SECONDS = 1.0
# The CRD may be older than this operator. All sessions have the same CRD.
REFUSED_SECONDS = 60.0

log = get_logger(__name__)


@dataclass
class _Tracked:
    """The latest progress of the session with this UID. `turn` is the number of its latest write, or 0."""

    uid: str
    progress: TrainingProgress | None
    report: WorkerReport | None = None
    turn: int = 0


class ProgressWriter:
    """A component that writes the progress of all sessions while this operator leads."""

    def __init__(self, cluster: Cluster, cache: Cache, leads: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._cache = cache
        self._leads = leads
        self._tracked: dict[Key, _Tracked] = {}
        self._changed: dict[Key, None] = {}
        self._turns = itertools.count(1)
        self._wakeup = asyncio.Event()

    def note(self, key: Key, report: WorkerReport) -> None:
        """Note a report of the session's worker."""
        if (body := self._body(key)) is None:
            return
        tracked = self._track(key, body)
        tracked.progress = next_progress(tracked.progress, tracked.report, report)
        tracked.report = report
        self._compare(key, tracked, body)

    def note_stopped(self, key: Key) -> None:
        """Note that the session has no worker, so that its progress names no tokens per second."""
        if (body := self._body(key)) is None or (key not in self._tracked and read_progress(body) is None):
            return
        tracked = self._track(key, body)
        tracked.progress = stopped_progress(tracked.progress) if tracked.progress is not None else None
        tracked.report = None
        self._compare(key, tracked, body)

    def forget(self, key: Key) -> None:
        self._tracked.pop(key, None)
        self._changed.pop(key, None)

    def end(self) -> None:
        """Forget all progress, because another operator leads now."""
        self._tracked.clear()
        self._changed.clear()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wakeup.wait()
            key = min(self._changed, key=lambda each: self._tracked[each].turn, default=None)
            if key is None:
                self._wakeup.clear()
            elif (manifest := self._take(key)) is not None:
                await asyncio.sleep(await self._write(key, manifest))

    def _body(self, key: Key) -> Manifest | None:
        """Return the session, or None if this operator must not write its progress."""
        body = self._cache.peek(Ref(key.kind, key.namespace, key.name))
        if body is None or not self._leads() or "deletionTimestamp" in body["metadata"]:
            return None
        return body

    def _track(self, key: Key, body: Manifest) -> _Tracked:
        """Return the progress in memory. A new leader continues from the written progress."""
        tracked, uid = self._tracked.get(key), body["metadata"]["uid"]
        if tracked is None or tracked.uid != uid:
            tracked = self._tracked[key] = _Tracked(uid, read_progress(body))
        return tracked

    def _compare(self, key: Key, tracked: _Tracked, body: Manifest) -> None:
        if tracked.progress is None or tracked.progress == read_progress(body):
            self._changed.pop(key, None)
        else:
            self._changed[key] = None
            self._wakeup.set()

    def _take(self, key: Key) -> Manifest | None:
        """Return the object to apply, or None if nothing is to be written any more."""
        del self._changed[key]
        tracked, body = self._tracked[key], self._body(key)
        progress = tracked.progress
        if body is None or body["metadata"]["uid"] != tracked.uid or progress in (None, read_progress(body)):
            return None
        tracked.turn = next(self._turns)
        guard = {"uid": tracked.uid, "resourceVersion": body["metadata"]["resourceVersion"]}
        return {
            "apiVersion": SESSIONS.api_version,
            "kind": SESSIONS.kind,
            "metadata": {"name": key.name, "namespace": key.namespace, **guard},
            "status": {"progress": progress.to_manifest()},
        }

    async def _write(self, key: Key, manifest: Manifest) -> float:
        """Write the progress, and return the seconds until the next write."""
        try:
            self._cache.note(await self._cluster.apply_progress(SESSIONS, manifest))
        except Refused as error:
            log.warning("progress refused", **key._asdict(), error=str(error), pause_seconds=REFUSED_SECONDS)
            return REFUSED_SECONDS
        except OperatorError as error:
            log.debug("progress not written", **key._asdict(), error=str(error))
        except Exception:
            # An operator without this task would end.
            log.exception("write of progress failed", **key._asdict())
        return PERIOD_SECONDS


def read_progress(body: Manifest) -> TrainingProgress | None:
    """Return the progress in the session's status, or None without a readable one."""
    written = (body.get("status") or {}).get("progress")
    try:
        return TrainingProgress.model_validate(written) if written is not None else None
    except ValidationError:
        return None
