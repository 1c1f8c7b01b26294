"""The start and the stop of clusters. Both the command `up` and the fixtures of tests use this module.

This package itself makes clusters from Go modules and Debian packages. With built programs, the start of a cluster
takes seconds. If this machine cannot run a cluster of this package and kind is installed, kind makes a cluster with a
single node. On request, kind makes the cluster even if this package could make one.
"""

from __future__ import annotations

import time

from testcluster import kind, own
from testcluster.cluster import find_kubectl
from testcluster.errors import ClusterError
from testcluster.places import Places, locked
from testcluster.record import Maker, Record, Tier, read_record, write_record
from testcluster.teardown import take_down


def missing(tier: Tier, nodes: int = 1) -> str | None:
    """Return a sentence that says what this machine lacks for such a cluster, or None if nothing is missing."""
    return None if choose_maker(tier, nodes) == "kind" else own.missing(tier)


def choose_maker(tier: Tier, nodes: int) -> Maker:
    """Choose the maker of a cluster. The maker is this package, if possible.

    The clusters of this package have an Ingress controller, and the storage classes that tests need.
    """
    for_kind = tier == "node" and nodes == 1 and own.missing(tier) is not None and kind.missing() is None
    return "kind" if for_kind else "ourselves"


def bring_up(name: str, tier: Tier, nodes: int = 1) -> Record:
    """Build missing programs, and start the cluster. A cluster that already runs is not changed.

    Raises ClusterError with the reason if the cluster does not start, or already runs with another tier or number of
    nodes. After a failed start, all started parts are stopped, and the logs are kept.
    """
    return _bring_up(name, tier, nodes, choose_maker(tier, nodes))


def bring_up_by_kind(name: str) -> Record:
    """Start a cluster with a single node by kind, even if this package itself could make one."""
    return _bring_up(name, "node", 1, "kind")


def _bring_up(name: str, tier: Tier, nodes: int, maker: Maker) -> Record:
    places = Places(name)
    with locked(places.lock):
        if (record := read_record(places)) is not None:
            if (record.tier, len(record.nodes)) != (tier, nodes if tier == "node" else 0):
                raise ClusterError(
                    f"Cluster {name} is up with tier {record.tier} and nodes {record.nodes}: take it down first."
                )
            print(f"cluster {name} is up already", flush=True)
            return record
        if (lack := kind.missing() if maker == "kind" else own.missing(tier)) is not None:
            raise ClusterError(lack)
        return _start(places, tier, nodes, maker)


def bring_down(name: str) -> bool:
    """Remove the cluster, even if the cluster runs only partly. Return whether any part of the cluster existed."""
    places = Places(name)
    with locked(places.lock):
        existed = places.directory.exists()
        _remove(places)
    return existed


def _start(places: Places, tier: Tier, nodes: int, maker: Maker) -> Record:
    if maker == "ourselves":
        own.build(tier)
    _remove(places)
    started = time.monotonic()
    try:
        record = _start_by_kind(places) if maker == "kind" else own.start(places, tier, nodes)
    except BaseException:
        _remove(places, keep_logs=True)
        raise
    write_record(record)
    print(f"cluster {places.name} came up in {time.monotonic() - started:.0f} s", flush=True)
    return record


def _start_by_kind(places: Places) -> Record:
    kind.create(places)
    return Record(
        name=places.name,
        tier="node",
        maker="kind",
        kubeconfig=str(places.kubeconfig),
        kubectl=str(find_kubectl()),
        nodes=(kind.node_name(places),),
    )


def _remove(places: Places, *, keep_logs: bool = False) -> None:
    if kind.was_here(places):
        kind.delete(places)
    take_down(places, keep_logs=keep_logs)
