"""The cluster that some of these tests install into, and the Prometheus that reads the chart's alerts."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from support.kubernetes import fixtures
from support.kubernetes.api_server import ApiNamespace, ApiServer
from support.kubernetes.charts import CHART, HELM, ROOT, HelmFailed, at, merged, with_registry
from support.kubernetes.fixtures import api_cluster, api_server, namespace, new_namespace, shared_namespace
from support.kubernetes.prometheus import build_when_used, prometheus
from support.requirements import require
from testcluster.addons.custom_resources import install_other_kinds, wait_established
from testcluster.cluster import Cluster
from testcluster.programs.builds import GO_MISSING

__all__ = ["api_cluster", "api_server", "namespace", "prometheus", "pytest_collection_finish", "shared_namespace"]

CRDS = ROOT / "crds"


@dataclass(frozen=True)
class Place:
    """A namespace, spoken to by helm, kubectl and requests to the API server."""

    cluster: Cluster
    api: ApiServer
    namespace: str

    @property
    def objects(self) -> ApiNamespace:
        return ApiNamespace(self.api, self.namespace)

    def helm(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        where = ["--kubeconfig", str(self.cluster.kubeconfig), "--namespace", self.namespace]
        given = ["--values", "-"] if values is not None else []
        command = [str(HELM), *where, *arguments, *given]
        given_values = json.dumps(with_registry(values or {}))
        done = subprocess.run(command, input=given_values, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise HelmFailed(done.stderr)
        return done.stdout

    def install(self, values: Mapping[str, Any] | None = None) -> str:
        """Install the release. The cluster is shared, so it takes over definitions that exist already."""
        taken = at("crds.takeOwnership", True)
        return self.helm("install", "tinsmith", str(CHART), "--take-ownership", values=merged(taken, values or {}))

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.namespace, *arguments, stdin=stdin)

    def uid(self, kind: str, name: str) -> str:
        return self.kubectl("get", kind, name, "--output=jsonpath={.metadata.uid}")

    def may(self, account: str, verb: str, resource: str, namespace: str | None = None) -> bool:
        """Return true if a ServiceAccount of this namespace may do so, here or in another."""
        user = f"system:serviceaccount:{self.namespace}:{account}"
        kind, _, name = resource.partition("/")
        plural, _, group = kind.partition(".")
        attributes = {"resource": plural, "group": group, "name": name}
        return self.api.may(user, verb, namespace or self.namespace, attributes)


@pytest.fixture(scope="session")
def kinds(api_cluster: Cluster) -> Cluster:
    """Return the cluster, with the kinds of Tinsmith, of the Gateway API and of the Prometheus operator."""
    require(shutil.which("go") is not None, GO_MISSING)
    api_cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={CRDS}")
    wait_established(api_cluster.kubectl, f"--filename={CRDS}")
    install_other_kinds(api_cluster.kubectl)
    return api_cluster


@pytest.fixture
def place(kinds: Cluster, api_server: ApiServer, namespace: str) -> Iterator[Place]:
    yield Place(kinds, api_server, namespace)
    # Objects outside of the namespace are not deleted with it.
    policies = kinds.kubectl("get", "validatingadmissionpolicybinding,validatingadmissionpolicy", "--output=name")
    if mine := [each for each in policies.split() if f"/{namespace}-" in each]:
        kinds.kubectl("delete", *mine)


@pytest.fixture(scope="session")
def shared_objects(kinds: Cluster, api_server: ApiServer, shared_namespace: str) -> ApiNamespace:
    """Return the namespace that tests share: they make dry runs, and delete what they create."""
    return ApiNamespace(api_server, shared_namespace)


@pytest.fixture
def another_namespace(kinds: Cluster) -> Iterator[str]:
    with new_namespace(kinds) as name:
        yield name


def pytest_collection_finish(session: pytest.Session) -> None:
    fixtures.pytest_collection_finish(session)
    build_when_used(session)
