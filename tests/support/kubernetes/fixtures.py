"""Fixtures for tests that need a real Kubernetes; a conftest imports those it uses.

A fresh cluster is made per test run, or the one that TINSMITH_TEST_CLUSTER names is used and left up: `make cluster-up`
once, then TINSMITH_TEST_CLUSTER=dev for run after run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.kubernetes.api_server import ApiServer, connected
from support.requirements import require
from testcluster import own
from testcluster.cluster import CONTEXT_VARIABLE, Cluster, configured_cluster, recorded
from testcluster.errors import ClusterError
from testcluster.lifecycle import bring_down, missing
from testcluster.places import Places
from testcluster.project_images import ImagesNotBuilt, build_images
from testcluster.record import Record, Tier, every_place, read_record

__all__ = [
    "Cluster",
    "api_cluster",
    "api_server",
    "cluster_of_a_run",
    "fresh_cluster",
    "namespace",
    "new_namespace",
    "node_cluster",
    "own_api_cluster",
    "pytest_collection_finish",
    "pytest_runtest_makereport",
    "shared_namespace",
    "two_node_cluster",
]

NAME_VARIABLE = "TINSMITH_TEST_CLUSTER"
_TESTCLUSTER = Path(__file__).parents[3] / "dev" / "testcluster"
_OF_A_RUN = re.compile(r"run-(?P<pid>\d+)-(api|node)-([012]|fresh)")
_FIXTURE_TIERS: dict[str, Tier] = {
    "api_cluster": "api",
    "fresh_cluster": "node",
    "node_cluster": "node",
    "two_node_cluster": "node",
}
_FOLDERS_WITH_IMAGES = ("images", "node")
_DIAGNOSIS = (
    ("get", "events", "--all-namespaces", "--sort-by=.lastTimestamp", "--request-timeout=10s"),
    ("get", "pods,persistentvolumeclaims", "--all-namespaces", "--output=wide", "--request-timeout=10s"),
)
_DIAGNOSIS_LINES = 60


@pytest.fixture(scope="session")
def api_cluster() -> Iterator[Cluster]:
    """etcd, the API server and the controllers, and no node: pods stay Pending, and a test writes their status."""
    with cluster_of_a_run("api", nodes=0) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def node_cluster() -> Iterator[Cluster]:
    """Start a cluster in which pods run."""
    configured = configured_cluster()
    if configured is not None:
        yield configured
        return
    with cluster_of_a_run("node", nodes=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_node_cluster() -> Iterator[Cluster]:
    """Start a cluster with `node-2` to lose; the first node carries the control plane, DNS and the ingress.

    One file of tests owns it: a node that was powered off stays off.
    """
    with cluster_of_a_run("node", nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def fresh_cluster() -> Iterator[Cluster]:
    """Start a cluster in which nothing was ever installed, for one file of tests."""
    with _own_cluster("node", 1, "fresh") as cluster:
        yield cluster


@contextmanager
def own_api_cluster() -> Iterator[Cluster]:
    """Start a cluster like `api_cluster`, for a file whose tests begin without kinds that others install."""
    with _own_cluster("api", 0, "fresh") as cluster:
        yield cluster


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make an empty namespace of the test, which admits restricted pods only, in the test's cluster."""
    [fixture] = [name for name in _FIXTURE_TIERS if name in request.fixturenames]
    cluster: Cluster = request.getfixturevalue(fixture)
    with new_namespace(cluster) as name:
        yield name


@pytest.fixture(scope="session")
def api_server(api_cluster: Cluster) -> Iterator[ApiServer]:
    """One connection to the API server for all tests."""
    with connected(api_cluster.kubeconfig) as api_server:
        yield api_server


@pytest.fixture(scope="session")
def shared_namespace(api_cluster: Cluster) -> Iterator[str]:
    """Make the namespace of the tests that make dry runs or delete what they create. It admits restricted pods only."""
    with new_namespace(api_cluster) as name:
        yield name


@contextmanager
def new_namespace(cluster: Cluster) -> Iterator[str]:
    """Make an empty namespace, which admits restricted pods only."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.make_namespace(name)
    try:
        yield name
    finally:
        cluster.delete_namespace(name)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build programs and images before the first test starts, so that no test is charged for it."""
    if session.config.option.collectonly:
        return
    wanted = {tier for item in session.items for tier in _tiers(item)}
    capture = session.config.pluginmanager.getplugin("capturemanager")
    for tier in sorted(wanted):
        if own.missing(tier) is None:
            with capture.global_and_fixture_disabled():
                own.build(tier)
    has_nodes = own.missing("node") is None or CONTEXT_VARIABLE in os.environ
    if any(_runs_images(item) for item in session.items) and has_nodes:
        with capture.global_and_fixture_disabled(), suppress(ImagesNotBuilt):
            # Those who need them say so again, as their own failure.
            build_images()
            if any(item.path.parent.name == "node" for item in session.items):
                build_images("test-services", "trainer-megatron")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the state of the cluster to the report of a test that failed in it."""
    report = yield
    used = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Cluster)]
    if report.failed:
        report.sections.extend(("cluster", diagnosis(cluster)) for cluster in used)
    return report


def diagnosis(cluster: Cluster) -> str:
    """Return the last lines of kubectl and of the cluster's processes."""
    parts = []
    for question in _DIAGNOSIS:
        try:
            answer = cluster.kubectl(*question)
        except ClusterError as error:
            answer = str(error)
        parts.append(f"$ kubectl {' '.join(question)}\n" + "\n".join(answer.splitlines()[-_DIAGNOSIS_LINES:]))
    return "\n".join([*parts, *_pod_logs(cluster), cluster.logs()])


def _pod_logs(cluster: Cluster) -> Iterator[str]:
    """Return the logs of pods that are not well, before and after their last restart."""
    try:
        listed = cluster.kubectl(
            "get", "pods", "--all-namespaces", "--no-headers", "--request-timeout=10s"
        ).splitlines()
    except ClusterError:
        return
    for namespace, pod, *_ in (line.split() for line in listed):
        for previous in ("--previous=true", "--previous=false"):
            words = [
                f"--namespace={namespace}",
                "logs",
                pod,
                "--all-containers",
                f"--tail={_DIAGNOSIS_LINES}",
                previous,
            ]
            try:
                yield f"$ kubectl {' '.join(words)}\n{cluster.kubectl(*words)}"
            except ClusterError:
                # Most have no previous container, some have not started.
                continue


def _runs_images(item: pytest.Item) -> bool:
    """Return true for tests of the images themselves, and of pods that run them."""
    return item.path.parent.name in _FOLDERS_WITH_IMAGES and item.path.parent.parent.name == "cluster"


def _tiers(item: pytest.Item) -> list[Tier]:
    names = getattr(item, "fixturenames", ())
    return [tier for fixture, tier in _FIXTURE_TIERS.items() if fixture in names]


@contextmanager
def cluster_of_a_run(tier: Tier, nodes: int) -> Iterator[Cluster]:
    record = _named()
    if record is not None and (record.tier, len(record.nodes)) == (tier, nodes):
        yield recorded(record)
        return
    with _own_cluster(tier, nodes, str(nodes)) as cluster:
        yield cluster


@contextmanager
def _own_cluster(tier: Tier, nodes: int, mark: str) -> Iterator[Cluster]:
    lack = missing(tier, nodes)
    require(lack is None, lack or "")
    _remove_left_behind()
    name = f"run-{os.getpid()}-{tier}-{mark}"
    if (record := read_record(Places(name))) is not None:
        # The same fixture of another folder's conftest has brought it up. That one ends later, and takes it down.
        yield recorded(record)
        return
    try:
        yield _brought_up(name, tier, nodes)
    finally:
        bring_down(name)


def _named() -> Record | None:
    """Return the cluster that the run is configured to use, where it fits."""
    name = os.environ.get(NAME_VARIABLE)
    record = read_record(Places(name)) if name else None
    if name and record is None:
        pytest.fail(f"{NAME_VARIABLE} names the cluster {name}, which is not up: `make cluster-up`, or unset it.")
    return record


def _brought_up(name: str, tier: Tier, nodes: int) -> Cluster:
    """Start the cluster in a process of its own, so that its processes are no children of the tests."""
    words = ["up", f"--name={name}", f"--tier={tier}", *([f"--nodes={nodes}"] if nodes else [])]
    command = [sys.executable, "-m", "testcluster", *words]
    environment = {**os.environ, "PYTHONPATH": str(_TESTCLUSTER)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    record = read_record(Places(name))
    if finished.returncode != 0 or record is None:
        pytest.fail(f"The cluster of tier {tier} did not come up.\n{finished.stdout}{finished.stderr}")
    return recorded(record)


def _remove_left_behind() -> None:
    """Clusters of test runs that were killed before they could take them down."""
    for place in every_place():
        found = _OF_A_RUN.fullmatch(place.name)
        if found and not Path(f"/proc/{found['pid']}").exists():
            bring_down(place.name)
