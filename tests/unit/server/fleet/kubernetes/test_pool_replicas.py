"""The pool of each pod, for any order of pool and endpoint events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.server.operator_stand_in import spec_of
from tinsmith_server.fleet.channels import TlsDirectory
from tinsmith_server.fleet.kubernetes.sampler_pool import Endpoint, Pool, PoolReplica, Pools, Slice, parse_pool

KEY = ("team", "fast")
POD = Endpoint("pod-1", "fast-1", "10.0.0.1", 7443, serving=True, terminating=False)


def pool(uid: str) -> Pool:
    return parse_pool({"metadata": {"name": "fast", "namespace": "team", "uid": uid}, "spec": spec_of()})


def endpoints(*pods: Endpoint) -> list[Slice]:
    return [Slice(KEY, "IPv4", pods)]


@pytest.fixture
def let_go() -> list[PoolReplica]:
    return []


@pytest.fixture
async def pools(tmp_path: Path, let_go: list[PoolReplica]) -> AsyncIterator[Pools]:
    pools = Pools(TlsDirectory(tmp_path), lambda endpoint: endpoint.target, let_go.append)
    yield pools
    for replica in (*pools.replicas, *let_go):
        await replica.close()


async def test_a_pod_seen_before_its_pool_was_made_again_is_taken_for_the_new_pools(
    pools: Pools, let_go: list[PoolReplica]
) -> None:
    pools.take({KEY: pool("old")}, endpoints(POD))
    [mistaken] = pools.replicas
    pools.take({KEY: pool("new")}, endpoints(POD))
    [replica] = pools.replicas
    assert (replica.pool.uid, replica.pool.deleted) == ("new", False)
    assert let_go == [mistaken]


async def test_a_pod_that_terminates_stays_of_the_pool_that_was_deleted(
    pools: Pools, let_go: list[PoolReplica]
) -> None:
    pools.take({KEY: pool("old")}, endpoints(POD))
    pools.take({}, endpoints(POD))
    pools.take({KEY: pool("new")}, endpoints(replace(POD, terminating=True)))
    [replica] = pools.replicas
    assert (replica.pool.uid, replica.pool.deleted, let_go) == ("old", True, [])


async def test_a_pod_of_an_unknown_pool_belongs_to_no_pool(pools: Pools) -> None:
    pools.take({}, endpoints(POD))
    assert pools.replicas == []
