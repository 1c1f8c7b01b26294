"""A worker is activated under an epoch that holds, or not at all."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import WorkerUnavailable
from tinsmith_server.fleet import activation
from tinsmith_server.fleet.activation import activate
from tinsmith_server.store.records import Worker
from typing_extensions import override


class Standby:
    """A registry of epochs with reads that always lag behind, so that no comparison with them holds."""

    async def get_worker(self, worker_id: str) -> Worker:
        return Worker(worker_id, epoch=1, instance_id="earlier", event_cursor=0)

    async def raise_epoch(self, _worker_id: str, _expected_epoch: int, _instance_id: str) -> None:
        return None


class Instance:
    async def describe(self) -> worker_pb2.DescribeReply:
        return worker_pb2.DescribeReply(instance_id="new")

    async def activate(self, epoch: int, event_cursor: int) -> str:
        raise AssertionError("it was activated under an epoch that does not hold")


class Primary:
    """A registry whose comparisons hold."""

    async def get_worker(self, worker_id: str) -> Worker:
        return Worker(worker_id, epoch=1, instance_id="earlier", event_cursor=77)

    async def raise_epoch(self, worker_id: str, expected_epoch: int, instance_id: str) -> Worker:
        return Worker(worker_id, expected_epoch + 1, instance_id, event_cursor=77)


async def test_a_worker_hears_up_to_which_event_the_store_knows_its_own() -> None:
    told: list[tuple[int, int]] = []

    class Listening(Instance):
        @override
        async def activate(self, epoch: int, event_cursor: int) -> str:
            told.append((epoch, event_cursor))
            return "new"

    await activate(cast("Any", Listening()), "w1", cast("Any", Primary()))
    assert told == [(2, 77)]


async def test_activation_by_a_store_that_reads_stale_epochs_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(WorkerUnavailable, match="worker w1 has not been activated"):
        await activate(cast("Any", Instance()), "w1", cast("Any", Standby()))
