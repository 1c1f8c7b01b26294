"""Delivery of operations to the journals of workers.

The delivery continues through restarts of workers and changes of the epoch.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable

from tinsmith_rpc import RELEASE_SEQ_ID, worker_pb2

from tinsmith_server.errors import HandleClosed, StaleEpoch, WorkerUnavailable
from tinsmith_server.fleet.base import Fleet, WorkerClient, WorkerHandle
from tinsmith_server.store.store import Store

RETRY_PAUSE_SECONDS = 0.1
# The SDK waits 60 s for a submission's answer, and retries for 300 s. So waiting here is better than a 503 at once.
PATIENCE_SECONDS = 25.0
STALE = (
    "the worker takes operations under an epoch that the store does not confirm; send the operation again, and an "
    "administrator can look whether database_url leads to a standby"
)


class _EpochReads:
    """Reads of a worker's epoch, which callers share.

    Operations that the journal acknowledges at the same time share one read of the epoch.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # The reads that have not begun.
        self._next: dict[str, asyncio.Task[int]] = {}

    async def epoch_now(self, worker_id: str) -> int:
        """Return the worker's epoch. The epoch is read after this call begins."""
        read = self._next.get(worker_id)
        if read is None:
            read = asyncio.create_task(self._read(worker_id), context=contextvars.Context())
            self._next[worker_id] = read
        return await asyncio.shield(read)

    async def _read(self, worker_id: str) -> int:
        # Later callers need another read, because their acknowledgement may come after this read.
        del self._next[worker_id]
        return await self._store.epoch_of(worker_id)


class Delivery:
    """The delivery of operations.

    `submit` returns when the operation is on the worker's disk under the current epoch.
    """

    def __init__(self, store: Store, fleet: Fleet, share_weight: Callable[[str], Awaitable[float | None]]) -> None:
        """Start.

        `share_weight` returns the weight of a tenant's share of a worker, or None for an equal share.
        """
        self._fleet = fleet
        self._share_weight = share_weight
        self._epochs = _EpochReads(store)

    async def submit(
        self,
        worker_id: str,
        request: worker_pb2.SubmitRequest,
        tenant: str,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> int:
        """Return the operation's number.

        If the operation has no number, the worker assigns a number by the idempotency key. Raises WorkerUnavailable
        after `patience_seconds`, WorkerUnstartable, ModelNotAtWorker, StorageFull or Unprocessable.
        """
        deadline = asyncio.get_running_loop().time() + patience_seconds
        while True:
            remaining = deadline - asyncio.get_running_loop().time()
            # The handle is looked up each time, because a worker that disappears and returns has a new handle.
            handle = self._fleet.worker(worker_id)
            failure: WorkerUnavailable | None = None
            try:
                worker = await handle.connection(max(remaining, 0))
            except HandleClosed as error:
                failure = error
            else:
                try:
                    if (number := await self._accepted(handle, worker, request, tenant)) is not None:
                        return number
                except WorkerUnavailable as error:
                    failure = error
            if remaining <= 0:
                raise failure or WorkerUnavailable(STALE)
            await asyncio.sleep(RETRY_PAUSE_SECONDS)

    async def release(
        self,
        worker_id: str,
        model_id: str,
        tenant: str,
        final_checkpoint: worker_pb2.SaveWeights | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        *,
        reason: str = "",
    ) -> None:
        """Submit the last operation of a model. Without a final checkpoint, the model's weights are lost.

        Raises the errors of `submit`.

        `reason` is the answer to later operations. `reason` is empty if the model's session has ended.
        """
        request = worker_pb2.SubmitRequest(
            model_id=model_id,
            seq_id=RELEASE_SEQ_ID,
            kind=worker_pb2.RELEASE_MODEL,
            payload=worker_pb2.ReleaseModel(final_checkpoint=final_checkpoint, reason=reason).SerializeToString(),
        )
        await self.submit(worker_id, request, tenant, patience_seconds)

    async def _accepted(
        self, handle: WorkerHandle, worker: WorkerClient, request: worker_pb2.SubmitRequest, tenant: str
    ) -> int | None:
        """Return the operation's number, or None if the worker's epoch is not the current epoch in the store."""
        try:
            reply = await worker.submit(request, tenant, await self._share_weight(tenant))
        except StaleEpoch:
            await handle.renew()
            return None
        if await self._epochs.epoch_now(handle.worker_id) == reply.epoch:
            return request.seq_id or reply.seq_id
        await handle.renew()
        return None
