"""One installation for the whole tier: chart, images, a tiny model in a volume, and one session that serves it.

Two operators, and two API servers on a PostgreSQL: whatever a test does to one of them, another is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.client.pipelined_program import Ending, checkpoint_run_folder, run_program
from support.kubernetes.charts import HELM, REGISTRY, ROOT
from support.kubernetes.installation import API_KEY, Installation, wait_for
from support.kubernetes.services import DATABASE_SECRET, postgresql
from support.readme import blocks
from testcluster.cluster import Cluster
from testcluster.project_images import build_images

NAMESPACE = "tinsmith"
SESSION = "tiny"
MODEL = "demo/tiny"
EXAMPLES = ROOT / "examples"

VALUES = {
    "keys": {"value": API_KEY},
    "apiServer": {"ingress": {"enabled": True}},
    # Enough where one node runs everything.
    "checkpoints": {"storage": {"accessModes": ["ReadWriteOnce"], "size": "10Gi"}},
}

OPERATORS = API_SERVERS = 2
SEVERAL = {
    **VALUES,
    "operator": {"replicas": OPERATORS},
    "apiServer": {
        "replicas": API_SERVERS,
        "database": {"existingSecret": DATABASE_SECRET},
        "ingress": {"enabled": True},
    },
}

# The kind, the name derived from the session's, and an edit that a person might make.
CHILDREN = [
    ("statefulset", "{}", {"spec": {"replicas": 0}}),
    ("service", "{}", {"spec": {"publishNotReadyAddresses": False}}),
    ("networkpolicy", "{}", {"spec": {"ingress": []}}),
    ("secret", "{}-tls", {"data": {"tls.crt": ""}}),
]

Run = Callable[[Callable[[], None]], Ending]


@pytest.fixture(scope="session")
def typed_readme(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of README's commands for Kubernetes, on a cluster of one node that has the images."""
    for archive in (build_images() | build_images("test-services")).values():
        node_cluster.load_image(archive)
    node_cluster.make_namespace(NAMESPACE)
    kubeconfig = tmp_path_factory.mktemp("newcomer") / "kubeconfig"
    shutil.copyfile(node_cluster.kubeconfig, kubeconfig)
    path = os.pathsep.join([str(HELM.parent), str(node_cluster.kubectl_program.parent), os.environ["PATH"]])
    typed = subprocess.run(
        ["bash", "-c", "\n".join(["set -e", on_one_node(blocks("Use it", "sh")[-1])])],
        cwd=ROOT,
        env={**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert typed.returncode == 0, typed.stdout
    return typed.stdout


def on_one_node(commands: str) -> str:
    """Return README's commands for one node whose images were loaded, with an end to `--watch`."""
    for printed, typed in {
        "REGISTRY": REGISTRY,
        "helm install tinsmith": f"helm install tinsmith --values {EXAMPLES}/values-one-node.yaml",
        "kubectl get tsess --watch": "kubectl wait tsess/tiny --for=condition=Ready --timeout=7m && kubectl get tsess",
    }.items():
        assert printed in commands
        commands = commands.replace(printed, typed)
    return commands


@pytest.fixture(scope="session")
def installation(node_cluster: Cluster, typed_readme: str) -> Iterator[Installation]:
    """README's installation, upgraded to several replicas on PostgreSQL."""
    installation = Installation(node_cluster, NAMESPACE, SEVERAL)
    for manifest in postgresql(NAMESPACE):
        installation.apply(manifest)
    installation.kubectl("rollout", "status", "deployment/postgresql", "--timeout=300s")
    installation.install()
    installation.wait_answering()
    yield installation
    node_cluster.delete_namespace(NAMESPACE)


@pytest.fixture
def session(installation: Installation) -> str:
    """Return the session of the examples, ready."""
    installation.apply(EXAMPLES / "session.yaml")
    installation.wait_ready(SESSION)
    return SESSION


@pytest.fixture
def run(installation: Installation, session: str, tmp_path: Path) -> Run:
    """Run the program through the ingress."""
    return lambda disturb: run_through_ingress(installation, disturb, tmp_path)


@pytest.fixture(scope="session")
def undisturbed(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    installation.apply(EXAMPLES / "session.yaml")
    installation.wait_ready(SESSION)
    return run_through_ingress(installation, lambda: None, tmp_path_factory.mktemp("undisturbed"))


def run_through_ingress(installation: Installation, disturb: Callable[[], None], directory: Path) -> Ending:
    def fetch_checkpoint(tinker_path: str) -> Path:
        return installation.fetch_checkpoint_folder(checkpoint_run_folder(tinker_path), directory / "checkpoint")

    with installation.service_client() as client:
        return run_program(client, MODEL, disturb, fetch_checkpoint)


def wait_gone(installation: Installation, kind: str, name: str, timeout_seconds: float = 420) -> None:
    wait_for(lambda: installation.get(kind, name) is None, timeout_seconds, lambda: f"{kind} {name} is still there")
