"""Gives a running worker its epoch: the fence between servers that do not know of each other."""

from __future__ import annotations

import asyncio

from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import StaleEpoch, WorkerUnavailable
from tinsmith_server.fleet.base import EpochRegistry
from tinsmith_server.fleet.client import GrpcWorkerClient

STALE_EPOCH_PAUSE_SECONDS = 0.02


async def activate(client: GrpcWorkerClient, worker_id: str, epochs: EpochRegistry) -> worker_pb2.DescribeReply:
    """Under an epoch that no other instance has had; several servers give one instance the same.

    Returns what the activated instance said of itself. Raises WorkerUnavailable, also when another
    instance took its place meanwhile: that one needs an epoch of its own.
    """
    description = await client.describe()
    instance_id = description.instance_id
    while True:
        row = await epochs.get_worker(worker_id)
        if row.instance_id != instance_id:
            raised = await epochs.raise_epoch(worker_id, row.epoch, instance_id)
            if raised is None:
                continue
            row = raised
        try:
            if await client.activate(row.epoch) != instance_id:
                raise WorkerUnavailable("the worker was started anew while it was activated")
            return description
        except StaleEpoch:
            # The volume has seen a higher epoch than the store gave: take the next one.
            await epochs.raise_epoch(worker_id, row.epoch, instance_id)
            await asyncio.sleep(STALE_EPOCH_PAUSE_SECONDS)
