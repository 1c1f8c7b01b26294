"""The cluster with a node runs pods as others do: images by digest, volumes, names, Services and an Ingress."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template

import httpx
import pytest
from support.kubernetes.fixtures import Cluster
from support.kubernetes.hello import hello_pod
from support.requirements import require
from testcluster.cluster import CONTEXT_VARIABLE, configured_cluster
from testcluster.errors import ClusterError
from testcluster.loading import COMMAND_VARIABLE
from testcluster.programs.archives import write_archive
from testcluster.programs.builds import HELLO, built

HOST = "hello.test"
NAMESPACE = "bare-cluster"
KNOWN_SECONDS = 120.0
POLL_SECONDS = 0.1
MANIFEST = Path(__file__).with_name("hello.yaml")


@dataclass(frozen=True)
class Hello:
    """A pod `hello-0` that answers HTTP and has a volume of each storage class."""

    cluster: Cluster
    namespace: str
    image: str

    def kubectl(self, *words: str) -> str:
        return self.cluster.kubectl(f"--namespace={self.namespace}", *words)

    def run(self, *words: str) -> str:
        return self.kubectl("exec", "hello-0", "--", "/hello", *words)

    def wait_ready(self) -> None:
        self.kubectl("rollout", "status", "statefulset/hello", "--timeout=180s")


@pytest.fixture(scope="module")
def hello(node_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hello]:
    archive = tmp_path_factory.mktemp("hello") / "hello.tar"
    write_archive(archive, "tinsmith.local/tinsmith/test-hello:1", built(HELLO) / "hello")
    [image] = node_cluster.load_image(archive)
    node_cluster.make_namespace(NAMESPACE)
    manifest = Template(MANIFEST.read_text()).substitute(IMAGE=image.pinned, HOST=HOST)
    node_cluster.kubectl(f"--namespace={NAMESPACE}", "apply", "--filename=-", stdin=manifest)
    hello = Hello(node_cluster, NAMESPACE, image.pinned)
    hello.wait_ready()
    yield hello
    node_cluster.delete_namespace(NAMESPACE)


def test_a_pod_names_its_image_by_digest_and_its_status_says_the_same(hello: Hello) -> None:
    status = "--output=jsonpath={.status.containerStatuses[0].imageID}"
    assert hello.kubectl("get", "pod", "hello-0", status) == hello.image


def test_a_pod_runs_an_image_that_a_named_command_brought_into_a_given_cluster(
    node_cluster: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a kubeconfig and the command are known of such a cluster."""
    require(len(node_cluster.runtimes) == 1, "The command here is containerd's, of a cluster of our own.")
    containerd = shlex.join(node_cluster.runtimes[0].command)
    monkeypatch.setenv("KUBECONFIG", str(node_cluster.kubeconfig))
    context = node_cluster.kubectl("config", "current-context").strip()
    monkeypatch.setenv(CONTEXT_VARIABLE, context)
    monkeypatch.setenv(COMMAND_VARIABLE, f"{containerd} --namespace=k8s.io images import - < {{archive}}")
    cluster = configured_cluster()
    assert cluster is not None
    assert cluster.nodes == node_cluster.nodes
    name = "tinsmith.local/tinsmith/test-hello:brought"
    [image] = cluster.load_image(write_archive(tmp_path / "hello.tar", name, built(HELLO) / "hello"))
    pod = hello_pod("brought")
    pod["spec"]["containers"][0]["image"] = image.name
    cluster.kubectl(f"--namespace={namespace}", "apply", "--filename=-", stdin=json.dumps(pod))
    ready = ("wait", "pod/brought", "--for=condition=Ready", "--timeout=120s")
    cluster.kubectl(f"--namespace={namespace}", *ready)


def test_pods_reach_services_and_each_other_by_name(hello: Hello) -> None:
    assert soon(lambda: hello.run("get", "http://front")) == "hello-0\n"
    assert soon(lambda: hello.run("get", f"http://hello-0.hello.{hello.namespace}.svc:8080")) == "hello-0\n"


def test_an_ingress_serves_the_host_that_it_names(hello: Hello) -> None:
    def ask() -> str:
        answer = httpx.get(hello.cluster.ingress_url, headers={"Host": HOST}, trust_env=False, timeout=30)
        return answer.raise_for_status().text

    assert soon(ask) == "hello-0\n"


def soon(ask: Callable[[], str]) -> str:
    """Return the answer of a service, once the whole cluster knows of it."""
    deadline = time.monotonic() + KNOWN_SECONDS
    while True:
        try:
            return ask()
        except (ClusterError, httpx.HTTPError):
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


@pytest.mark.parametrize("volume", ["local", "shared"])
def test_a_volume_outlives_its_pod_and_grows(volume: str, hello: Hello) -> None:
    assert hello.run("append", f"/{volume}/words", "one") == "one\n"
    hello.kubectl("delete", "pod", "hello-0", "--grace-period=1")
    # The status of its StatefulSet may still count it as ready.
    hello.kubectl("wait", "pod/hello-0", "--for=create", "--timeout=120s")
    hello.kubectl("wait", "pod/hello-0", "--for=condition=Ready", "--timeout=120s")
    assert hello.run("append", f"/{volume}/words", "two") == "one\ntwo\n"
    hello.kubectl("patch", "pvc", volume, '--patch={"spec": {"resources": {"requests": {"storage": "2Gi"}}}}')
    grown = "--for=jsonpath={.status.capacity.storage}=2Gi"
    hello.kubectl("wait", f"pvc/{volume}", grown, "--timeout=120s")


def test_a_killed_container_starts_again_in_the_same_pod(hello: Hello) -> None:
    count = "jsonpath={.status.containerStatuses[0].restartCount}"
    before = int(hello.kubectl("get", "pod", "hello-0", f"--output={count}"))
    hello.cluster.kill_container(hello.namespace, "hello-0", "hello")
    restarted = f"--for={count}={before + 1}"
    hello.kubectl("wait", "pod/hello-0", restarted, "--timeout=180s")
    hello.kubectl("wait", "pod/hello-0", "--for=condition=Ready", "--timeout=180s")
