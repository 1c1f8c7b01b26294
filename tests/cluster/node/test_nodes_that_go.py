"""Drained and dead nodes: a worker leaves a drained one, and may still run on a silent one.

No other worker starts until a person declares the node dead. The node stays off in the end: fixtures define the order.
The chart's own pods run on the other node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from cluster.node.conftest import EXAMPLES, MODEL, NAMESPACE, SESSION, VALUES, run_through_ingress
from support.client.pipelined_program import Ending
from support.kubernetes.installation import Installation, Object, wait_for
from support.kubernetes.worker_call import last_snapshot_seconds
from testcluster.cluster import Cluster
from testcluster.project_images import build_images

FIRST, SECOND = "node-1", "node-2"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
BOUND = "bound-to-node"
"""A session whose volume is on its node's disk."""


@pytest.fixture(scope="module")
def installation(two_node_cluster: Cluster) -> Iterator[Installation]:
    """Return the installation with both sessions ready on the second node."""
    load_images(two_node_cluster)
    two_node_cluster.make_namespace(NAMESPACE)
    installation = Installation(two_node_cluster, NAMESPACE, values())
    installation.install()
    for manifest in yaml.safe_load_all((EXAMPLES / "tiny-model.yaml").read_text()):
        if manifest["kind"] == "PersistentVolumeClaim":
            manifest["spec"]["storageClassName"] = "shared"
        installation.apply(manifest)
    installation.kubectl("wait", "job/make-tiny-model", "--for=condition=complete", "--timeout=420s")
    two_node_cluster.kubectl("cordon", FIRST)
    for manifest in (session_manifest(SESSION, MODEL, "shared"), session_manifest(BOUND, "demo/bound", "local")):
        installation.apply(manifest)
    for name in (SESSION, BOUND):
        installation.wait_ready(name)
    installation.wait_answering()
    yield installation
    two_node_cluster.kubectl("uncordon", FIRST)
    two_node_cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture(scope="module")
def undisturbed(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    return run_through_ingress(installation, lambda: None, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def drained_and_back(
    installation: Installation, undisturbed: Ending, tmp_path_factory: pytest.TempPathFactory
) -> Ending:
    """Return a program whose worker was drained to the other node, and evicted from there when its own was back."""
    cluster = installation.cluster

    def drain_there_and_back() -> None:
        cluster.kubectl("uncordon", FIRST)
        asked_at = time.time()
        leave(installation, lambda: cluster.kubectl("drain", SECOND, "--delete-emptydir-data", "--timeout=120s"), FIRST)
        assert last_snapshot_seconds(installation, SESSION) >= asked_at
        assert pod_of(installation, BOUND)["spec"].get("nodeName") is None
        cluster.kubectl("cordon", FIRST)
        cluster.kubectl("uncordon", SECOND)
        leave(installation, lambda: installation.evict(f"{SESSION}-0"), SECOND)

    ending = run_through_ingress(installation, drain_there_and_back, tmp_path_factory.mktemp("drained"))
    installation.wait_ready(BOUND)
    return ending


def leave(installation: Installation, ask_to_leave: Callable[[], object], other: str) -> None:
    """Drain the node, and wait until the worker serves on the other node."""
    before = pod_of(installation)["metadata"]["uid"]
    ask_to_leave()

    def is_there() -> bool:
        pod = installation.get("pod", f"{SESSION}-0") or {"metadata": {"uid": before}, "spec": {}}
        return pod["metadata"]["uid"] != before and pod["spec"].get("nodeName") == other

    wait_for(is_there, 90, lambda: f"the worker is on {node_of(installation)}")
    installation.kubectl("wait", f"pod/{SESSION}-0", "--for=condition=Ready", "--timeout=180s")
    installation.wait_ready(SESSION)


@pytest.fixture(scope="module")
def cut_off_and_back(
    installation: Installation,
    undisturbed: Ending,
    drained_and_back: Ending,
    tmp_path_factory: pytest.TempPathFactory,
) -> Ending:
    """Return a program whose worker's node was cut off for a while."""

    def cut_off_for_a_while() -> None:
        before = pod_of(installation)
        installation.cluster.cut_off(SECOND)
        try:
            message = wait_unreachable(installation)
        finally:
            installation.cluster.reconnect(SECOND)
        assert SECOND in message
        assert "out-of-service" in message
        installation.wait_ready(SESSION, 240)
        # The kubelet says of its pods that they are ready before it says so of its node. Of one that dies in between,
        # Kubernetes never marks the pods again: it does so when a node stops being ready.
        installation.cluster.kubectl("wait", f"node/{SECOND}", "--for=condition=Ready", "--timeout=60s")
        after = pod_of(installation)
        assert after["metadata"]["uid"] == before["metadata"]["uid"]
        assert after["status"]["containerStatuses"][0]["restartCount"] == 0

    ending = run_through_ingress(installation, cut_off_for_a_while, tmp_path_factory.mktemp("cut-off"))
    wait_for(lambda: not is_degraded(installation), 30, lambda: "the session stays Degraded")
    return ending


@pytest.fixture(scope="module")
def node_lost(installation: Installation, cut_off_and_back: Ending, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """Return a program whose worker's node was powered off and declared dead.

    It stays off: so it was cut off before.
    """

    def lose_the_node_and_say_so() -> None:
        before = pod_of(installation)
        installation.cluster.power_off(SECOND)
        installation.cluster.kubectl("uncordon", FIRST)
        wait_unreachable(installation)
        installation.kubectl("delete", "pod", f"{SESSION}-0", "--wait=false")
        installation.cluster.kubectl("wait", f"node/{SECOND}", "--for=condition=Ready=Unknown", "--timeout=10s")
        still = pod_of(installation)
        assert still["metadata"]["uid"] == before["metadata"]["uid"]

        installation.cluster.kubectl("taint", "node", SECOND, OUT_OF_SERVICE)
        wait_for(lambda: node_of(installation) == FIRST, 90, lambda: f"the worker is on {node_of(installation)}")
        installation.wait_ready(SESSION, 240)

    return run_through_ingress(installation, lose_the_node_and_say_so, tmp_path_factory.mktemp("lost"))


def test_a_drained_worker_continues_on_another_node_from_its_volume(
    drained_and_back: Ending, undisturbed: Ending
) -> None:
    assert drained_and_back.ran_each_step_once()
    assert drained_and_back == undisturbed


def test_a_worker_continues_after_its_node_was_cut_off_for_a_while(
    cut_off_and_back: Ending, undisturbed: Ending
) -> None:
    assert cut_off_and_back.ran_each_step_once()
    assert cut_off_and_back == undisturbed


def test_a_worker_of_a_dead_node_starts_on_another_once_an_administrator_marks_the_node(
    node_lost: Ending, undisturbed: Ending
) -> None:
    assert node_lost.ran_each_step_once()
    assert node_lost == undisturbed


@pytest.mark.usefixtures("node_lost")
def test_a_volume_that_went_with_its_node_is_named(installation: Installation) -> None:
    message = installation.wait_reason(BOUND, "VolumeOnLostNode", 90)
    assert "Bring the node back" in message
    assert installation.condition(BOUND, "Degraded")["status"] == "True"


def load_images(cluster: Cluster) -> None:
    """Load the trainer's image on both nodes, at once, since it is large."""
    archives = build_images()
    trainer = archives.pop("trainer")
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda node: node.load(trainer), cluster.runtimes):
            pass
    for archive in archives.values():
        cluster.runtimes[0].load(archive)


def values() -> Object:
    stays = {"nodeSelector": {"kubernetes.io/hostname": FIRST}}
    return {
        **VALUES,
        "operator": stays,
        "apiServer": {**VALUES["apiServer"], **stays},
        "checkpoints": {"storage": {"storageClassName": "shared", "size": "10Gi"}},
    }


def session_manifest(name: str, base_model: str, storage_class: str) -> Object:
    """Return the session of the examples, with a volume of this class."""
    manifest: Object = yaml.safe_load((EXAMPLES / "session.yaml").read_text())
    manifest["metadata"]["name"] = name
    manifest["spec"]["model"]["name"] = base_model
    manifest["spec"]["storage"]["storageClassName"] = storage_class
    return manifest


def wait_unreachable(installation: Installation) -> str:
    """Wait at most a minute for the message, and return it."""
    message = installation.wait_reason(SESSION, "NodeUnreachable", 60)
    assert is_degraded(installation)
    return message


def is_degraded(installation: Installation) -> bool:
    degraded: bool = installation.condition(SESSION, "Degraded")["status"] == "True"
    return degraded


def pod_of(installation: Installation, session: str = SESSION) -> Object:
    pod = installation.get("pod", f"{session}-0")
    assert pod is not None
    return pod


def node_of(installation: Installation) -> str | None:
    pod = installation.get("pod", f"{SESSION}-0") or {"spec": {}}
    name: str | None = pod["spec"].get("nodeName")
    return name
