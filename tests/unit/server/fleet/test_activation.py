"""A worker is activated under an epoch that holds, or not at all."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import WorkerUnavailable
from tinsmith_server.fleet import activation
from tinsmith_server.fleet.activation import activate
from tinsmith_server.store.records import Worker


class Standby:
    """A registry of epochs whose reads lag behind for ever, so that no comparison with them holds."""

    async def get_worker(self, worker_id: str) -> Worker:
        return Worker(worker_id, epoch=1, instance_id="earlier", event_cursor=0)

    async def raise_epoch(self, _worker_id: str, _expected_epoch: int, _instance_id: str) -> None:
        return None


class Instance:
    async def describe(self) -> worker_pb2.DescribeReply:
        return worker_pb2.DescribeReply(instance_id="new")

    async def activate(self, _epoch: int) -> str:
        raise AssertionError("it was activated under an epoch that does not hold")


async def test_activation_by_a_store_that_reads_stale_epochs_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(WorkerUnavailable, match="worker w1 has not been activated"):
        await activate(cast("Any", Instance()), "w1", cast("Any", Standby()))
