"""How the workers and the store are doing, looked at in the background for metrics and capabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import WorkerError
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.store.base import Store


class Inspection:
    """The latest look; a scrape never waits for a worker and never starts one."""

    def __init__(self, store: Store, fleet: Fleet) -> None:
        self._store = store
        self._fleet = fleet
        self.workers: Mapping[str, worker_pb2.DescribeReply] = {}
        self.rows: Mapping[str, int] = {}

    async def look(self) -> None:
        seen: dict[str, worker_pb2.DescribeReply] = {}
        for handle in self._fleet.workers:
            worker = handle.running()
            if worker is not None:
                with contextlib.suppress(WorkerError):
                    seen[handle.worker_id] = await worker.describe()
        self.workers = seen
        self.rows = await self._store.counts()

    def max_sequence_length(self, worker_id: str) -> int | None:
        """None while the worker has not been seen."""
        description = self.workers.get(worker_id)
        return description.base_model.max_sequence_length or None if description else None
