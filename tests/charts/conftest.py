"""The cluster that some of these tests install into, and the Prometheus that reads the chart's alerts."""

from __future__ import annotations

import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from support.kubernetes import fixtures
from support.kubernetes.charts import CHART, HELM, ROOT, Object
from support.kubernetes.fixtures import api_cluster, namespace
from support.kubernetes.prometheus import build_when_used, prometheus
from support.requirements import require
from testcluster.addons.custom_resources import install_other_kinds, wait_established
from testcluster.cluster import Cluster
from testcluster.programs.builds import GO_MISSING

__all__ = ["api_cluster", "namespace", "prometheus", "pytest_collection_finish"]

CRDS = ROOT / "crds"


@dataclass(frozen=True)
class Place:
    """A namespace, spoken to by helm and kubectl."""

    cluster: Cluster
    namespace: str

    def helm(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        where = ["--kubeconfig", str(self.cluster.kubeconfig), "--namespace", self.namespace]
        given = ["--values", "-"] if values is not None else []
        command = [str(HELM), *where, *arguments, *given]
        done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def install(self, values: Mapping[str, Any] | None = None) -> str:
        """The definition of a session may be there already: the cluster is shared, and this release takes it over."""
        return self.helm("install", "tinsmith", str(CHART), "--take-ownership", values=values or {})

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.namespace, *arguments, stdin=stdin)

    def would_accept(self, manifest: Object) -> None:
        """Raises ClusterError with the API server's words when it would not."""
        text = json.dumps(manifest)
        self.kubectl("create", "--dry-run=server", "--validate=strict", "--filename=-", stdin=text)

    def uid(self, kind: str, name: str) -> str:
        return self.kubectl("get", kind, name, "--output=jsonpath={.metadata.uid}")

    def may(self, account: str, verb: str, resource: str, namespace: str | None = None) -> bool:
        """Whether a ServiceAccount of this namespace may do so, here or in another."""
        user = f"system:serviceaccount:{self.namespace}:{account}"
        where = f"--namespace={namespace or self.namespace}"
        review = ["auth", "can-i", verb, resource, where, f"--as={user}"]
        command = [str(self.cluster.kubectl_program), f"--kubeconfig={self.cluster.kubeconfig}", *review]
        # "no" is a status of 1.
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout.strip() in {"yes", "no"}, done.stderr
        return done.stdout.strip() == "yes"


@pytest.fixture(scope="session")
def kinds(api_cluster: Cluster) -> Cluster:
    """The cluster, with the kinds of Tinsmith, of the Gateway API and of the Prometheus operator."""
    require(shutil.which("go") is not None, GO_MISSING)
    api_cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={CRDS}")
    wait_established(api_cluster.kubectl, f"--filename={CRDS}")
    install_other_kinds(api_cluster.kubectl)
    return api_cluster


@pytest.fixture
def place(kinds: Cluster, namespace: str) -> Iterator[Place]:
    yield Place(kinds, namespace)
    # What belongs to no namespace goes with none.
    for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
        mine = [each for each in kinds.kubectl("get", kind, "--output=name").split() if f"/{namespace}-" in each]
        if mine:
            kinds.kubectl("delete", *mine)


@pytest.fixture
def another_namespace(kinds: Cluster) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    kinds.make_namespace(name)
    yield name
    kinds.delete_namespace(name)


def pytest_collection_finish(session: pytest.Session) -> None:
    fixtures.pytest_collection_finish(session)
    build_when_used(session)
