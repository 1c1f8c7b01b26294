"""A sampler gets the address of the worker that made the save, if it can reach it, and of no other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import pytest
from support.server.fake_fleet import FakeHandle, FakeReplica
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import WorkerAbsent
from tinsmith_server.fleet.base import Fleet, SamplerHandle, SavesAddress
from tinsmith_server.services.sampling.adapter_delivery import Save, SaveSources

SAVE = Save("ephemeral/a", "digest", 370, "maker")
ADDRESS = SavesAddress("10.0.0.1:7443", "maker", "research")


@pytest.fixture
def maker() -> FakeHandle:
    handle = FakeHandle("maker", "tiny-1")
    handle.saves_address = ADDRESS
    return handle


@pytest.fixture
def fleet(maker: FakeHandle) -> Fleet:
    """All that is asked of it: which workers are there."""
    return cast(Fleet, Workers({"maker": maker, "other": FakeHandle("other", "tiny-1")}))


@dataclass
class Workers:
    handles: dict[str, FakeHandle]

    def worker(self, worker_id: str) -> FakeHandle:
        if worker_id not in self.handles:
            raise WorkerAbsent(worker_id)
        return self.handles[worker_id]


def adapter_for(sampler: SamplerHandle, save: Save, fleet: Fleet) -> worker_pb2.AdapterRef:
    return SaveSources(fleet, streams=True).adapter_for(sampler, save)


def replica(network: str | None) -> FakeReplica:
    replica = FakeReplica("p1", "tiny-1")
    replica.network = network
    return replica


def test_a_sampler_in_the_network_of_the_worker_gets_the_source_and_the_size_of_the_save(fleet: Fleet) -> None:
    adapter = adapter_for(replica("research"), SAVE, fleet)
    assert (adapter.directory, adapter.manifest_digest) == ("ephemeral/a", "digest")
    assert (adapter.source.target, adapter.source.worker_id) == (ADDRESS.target, "maker")
    assert adapter.source.size_bytes == 370


@pytest.mark.parametrize("network", [None, "production"], ids=["in an unknown network", "in another namespace"])
def test_a_sampler_that_cannot_reach_it_hears_nothing_of_it(fleet: Fleet, network: str | None) -> None:
    assert not adapter_for(replica(network), SAVE, fleet).HasField("source")


def test_with_streams_turned_off_no_replica_gets_a_workers_address(fleet: Fleet) -> None:
    adapter = SaveSources(fleet, streams=False).adapter_for(replica("research"), SAVE)
    assert (adapter.manifest_digest, adapter.HasField("source")) == ("digest", False)


def test_a_worker_that_streams_nothing_just_now_is_not_named(fleet: Fleet, maker: FakeHandle) -> None:
    maker.saves_address = None
    assert not adapter_for(replica("research"), SAVE, fleet).HasField("source")
    assert not adapter_for(replica(None), SAVE, fleet).HasField("source")


@pytest.mark.parametrize("worker_id", ["", "gone", "other"])
def test_no_source_is_named_when_the_worker_of_a_save_is_unknown_or_absent(fleet: Fleet, worker_id: str) -> None:
    assert not adapter_for(replica("research"), replace(SAVE, worker_id=worker_id), fleet).HasField("source")
