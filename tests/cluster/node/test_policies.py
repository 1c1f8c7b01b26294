"""Between the parts: who reaches whom is what docs/explanation/security.md says, and not what a stranger would like."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.node.conftest import EXAMPLES, SESSION
from support.kubernetes.installation import API_SERVER, Installation, wait_for
from support.kubernetes.reach import DNS, Place, address, stranger

ELSEWHERE = "tinsmith-strangers"
OPERATOR = "app.kubernetes.io/component=operator"
# What labels can be copied, a stranger copies.
LABELS_OF_ANOTHER_WORKER = {"app.kubernetes.io/name": "tinsmith-worker", "tinsmith.dev/session": "another"}
LABELS_OF_AN_API_SERVER = {"app.kubernetes.io/name": "tinsmith", "app.kubernetes.io/component": "api-server"}
LABELS_OF_A_SAMPLER = {"app.kubernetes.io/name": "tinsmith-sampler", "tinsmith.dev/pool": "another"}
STRANGER, ANOTHER_WORKER, IMPOSTOR = "stranger", "another-worker", "impostor"
SAMPLER, FAR_SAMPLER = "sampler-near", "sampler-elsewhere"
RPC_PORT = 7443

OUTSIDE = {"DNS", "the Kubernetes API", "the ingress"}
OPEN_TO_ALL = {"an API server", "the operator's metrics"}


@pytest.fixture(scope="module")
def strangers(installation: Installation) -> Iterator[dict[str, Place]]:
    """Start pods outside of the installation.

    One looks like another session's worker and one like a pool's sampler; in another namespace, one looks like an API
    server, and one like a sampler.
    """
    cluster = installation.cluster
    cluster.make_namespace(ELSEWHERE)
    for manifest in (
        stranger(STRANGER, {}),
        stranger(ANOTHER_WORKER, LABELS_OF_ANOTHER_WORKER, listens_on=RPC_PORT),
        stranger(SAMPLER, LABELS_OF_A_SAMPLER),
    ):
        installation.apply(manifest)
    elsewhere = Installation(cluster, ELSEWHERE)
    for name, labels in ((IMPOSTOR, LABELS_OF_AN_API_SERVER), (FAR_SAMPLER, LABELS_OF_A_SAMPLER)):
        elsewhere.apply(stranger(name, labels))
    places = ((installation, (STRANGER, ANOTHER_WORKER, SAMPLER)), (elsewhere, (IMPOSTOR, FAR_SAMPLER)))
    for one, pods in places:
        one.kubectl("wait", "pod", *pods, "--for=condition=Ready", "--timeout=120s")
    yield {pod: Place(cluster, one.namespace, pod) for one, pods in places for pod in pods}
    for one, pods in places:
        one.kubectl("delete", "pod", *pods, "--grace-period=0", "--force")
    cluster.delete_namespace(ELSEWHERE)


@pytest.fixture(scope="module")
def targets(installation: Installation, strangers: dict[str, Place]) -> dict[str, str]:
    installation.apply(EXAMPLES / "session.yaml")
    installation.wait_ready(SESSION)

    def at(pod: str, port: int) -> str:
        return f"{address(installation.cluster, installation.namespace, pod)}:{port}"

    operator, worker = one_of(installation, OPERATOR), f"{SESSION}-0"
    return {
        "the worker's RPC": at(worker, RPC_PORT),
        "the worker's health": at(worker, 7080),
        "another worker": at(ANOTHER_WORKER, RPC_PORT),
        "an API server": at(one_of(installation, API_SERVER), 8000),
        "the operator's metrics": at(operator, 9090),
        "the operator's health": at(operator, 8080),
        "the database": f"{service_address(installation, installation.namespace, 'postgresql')}:5432",
        "the Kubernetes API": f"{service_address(installation, 'default', 'kubernetes')}:443",
        "the ingress": f"{installation.cluster.ingress_url.removeprefix('http://')}:80",
        "DNS": DNS,
    }


def one_of(installation: Installation, selector: str) -> str:
    """Return a pod that runs and stays."""

    def found() -> str | None:
        pods = [pod for pod in installation.list("pod", selector) if "deletionTimestamp" not in pod["metadata"]]
        ready = [pod for pod in pods if pod["status"].get("podIP") and pod["status"]["phase"] == "Running"]
        return ready[0]["metadata"]["name"] if ready else None

    return wait_for(found, 120, lambda: f"no pod is {selector}")


def service_address(installation: Installation, namespace: str, name: str) -> str:
    return installation.cluster.kubectl(
        f"--namespace={namespace}", "get", "service", name, "--output=jsonpath={.spec.clusterIP}"
    )


def reached_by(installation: Installation, pod: str, targets: dict[str, str]) -> set[str]:
    return Place(installation.cluster, installation.namespace, pod).reaches(targets)


@pytest.mark.parametrize("who", [STRANGER, ANOTHER_WORKER, IMPOSTOR, FAR_SAMPLER])
def test_a_stranger_reaches_api_servers_and_metrics_and_no_worker(
    who: str, strangers: dict[str, Place], targets: dict[str, str]
) -> None:
    """Its labels do not matter; the database and the listening stranger are not defended here."""
    undefended = {"the database", "another worker"}
    assert strangers[who].reaches(targets) == OPEN_TO_ALL | OUTSIDE | undefended


def test_a_pools_sampler_reaches_the_workers_of_its_namespace_by_their_port_for_calls(
    strangers: dict[str, Place], targets: dict[str, str]
) -> None:
    """No other label counts; the worker asks for a certificate then."""
    undefended = {"the database", "another worker"}
    assert strangers[SAMPLER].reaches(targets) == OPEN_TO_ALL | OUTSIDE | undefended | {"the worker's RPC"}


def test_a_worker_reaches_no_other_pod(installation: Installation, targets: dict[str, str]) -> None:
    others = {name: target for name, target in targets.items() if not name.startswith("the worker's")}
    assert reached_by(installation, f"{SESSION}-0", others) == set()


def test_an_api_server_reaches_workers_the_database_and_the_kubernetes_api(
    installation: Installation, targets: dict[str, str]
) -> None:
    others = {name: target for name, target in targets.items() if name != "an API server"}
    allowed = {"the worker's RPC", "another worker", "the database", "the Kubernetes API", "DNS"}
    assert reached_by(installation, one_of(installation, API_SERVER), others) == allowed


def test_the_operator_reaches_workers_and_the_kubernetes_api(
    installation: Installation, targets: dict[str, str]
) -> None:
    others = {name: target for name, target in targets.items() if not name.startswith("the operator's")}
    allowed = {"the worker's RPC", "another worker", "the Kubernetes API", "DNS"}
    assert reached_by(installation, one_of(installation, OPERATOR), others) == allowed
