"""The activation of a running worker under an epoch.

The epoch blocks older servers that do not know of this activation.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING

from tinsmith_rpc import worker_pb2
from typing_extensions import override

from tinsmith_server.errors import StaleEpoch, WorkerFull, WorkerUnavailable
from tinsmith_server.fleet.base import WorkerHandle
from tinsmith_server.fleet.client import GrpcWorkerClient

if TYPE_CHECKING:
    from tinsmith_server.store.store import Store

STALE_EPOCH_PAUSE_SECONDS = 0.02
# Several servers that raise one worker's epoch at once need far less time. The limit is for a server that reads from a
# standby, which may never show the newest epoch.
PATIENCE_SECONDS = 20.0


async def activate(client: GrpcWorkerClient, worker_id: str, epochs: Store) -> worker_pb2.DescribeReply:
    """Activate the worker under an epoch that no earlier instance of the worker had.

    Several servers give the same instance the same epoch. Returns the description of the activated instance. Raises
    WorkerUnavailable if the activation is not possible now. WorkerUnavailable also means that another instance has
    replaced the worker, because each instance needs its own epoch.
    """
    description = await client.describe()
    instance_id = description.instance_id
    clock = asyncio.get_running_loop().time
    until = clock() + PATIENCE_SECONDS
    while clock() < until:
        row = await epochs.get_worker(worker_id)
        if row.instance_id != instance_id:
            raised = await epochs.raise_epoch(worker_id, row.epoch, instance_id)
            if raised is None:
                await asyncio.sleep(STALE_EPOCH_PAUSE_SECONDS)
                continue
            row = raised
        try:
            if await client.activate(row.epoch, row.event_cursor) != instance_id:
                raise WorkerUnavailable("the worker restarted during its activation")
            return description
        except WorkerFull as error:
            raise WorkerUnavailable(str(error)) from error  # retry until its volume has space
        except StaleEpoch:
            # The volume knows a higher epoch than the store returned. Take the epoch after that.
            await epochs.raise_epoch(worker_id, row.epoch, instance_id)
            await asyncio.sleep(STALE_EPOCH_PAUSE_SECONDS)
    raise WorkerUnavailable(
        f"worker {worker_id} has not been activated: for {PATIENCE_SECONDS:g} s the store has returned an outdated "
        "epoch; the server retries"
    )


class ActivatedHandle(WorkerHandle):
    """The part of a handle that local workers and workers in a cluster have in common."""

    _epochs: Store
    """The store, which is set before the first connection exists."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._renewal = asyncio.Lock()

    @property
    @override
    def worker_id(self) -> str:
        return self._worker_id

    @property
    @override
    def name(self) -> str:
        return self._worker_id

    @property
    @override
    def accepting(self) -> bool:
        """Return True, because the first sample starts a worker that is not running."""
        return True

    @property
    @override
    def leaving(self) -> str | None:
        return None

    @abstractmethod
    @override
    def running(self) -> GrpcWorkerClient | None: ...

    @override
    async def renew(self) -> None:
        async with self._renewal:
            client = self.running()
            if client is not None:
                await self._activate(client)

    async def _activate(self, client: GrpcWorkerClient) -> worker_pb2.DescribeReply:
        return await activate(client, self._worker_id, self._epochs)
