"""Tinsmith installed in a cluster by its chart, as users have it: helm, kubectl, and the SDK through the ingress."""

from __future__ import annotations

import base64
import json
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import httpx
import tinker
import yaml
from support.kubernetes.charts import CHART, HELM, with_registry
from testcluster.cluster import Cluster
from testcluster.errors import ClusterError
from testcluster.tar_files import extract_files

API_KEY = "tml-test-key-in-a-cluster"
POLL_SECONDS = 0.5
CLOSE_SECONDS = 60.0
API_SERVER = "app.kubernetes.io/component=api-server"
CHECKPOINTS = "/var/lib/tinsmith/checkpoints"

T = TypeVar("T")
Object = dict[str, Any]


@dataclass(slots=True)
class Installation:
    """One release in one namespace of a cluster."""

    cluster: Cluster
    namespace: str
    values: Mapping[str, Any] = field(default_factory=dict)
    release: str = "tinsmith"
    chart: Path = CHART
    api_key: str = API_KEY
    by_node_port: bool = False
    """Whether clients use the Service's port on the nodes instead of the ingress."""

    # ---- helm

    def helm(self, *arguments: str, stdin: str | None = None) -> str:
        command = [str(HELM), "--kubeconfig", str(self.cluster.kubeconfig), "--namespace", self.namespace, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def install(self) -> str:
        """Install the release, wait until all its pods are ready, and return the notes."""
        arguments = [
            "upgrade",
            "--install",
            self.release,
            str(self.chart),
            "--values",
            "-",
            "--wait",
            "--timeout",
            "5m",
        ]
        return self.helm(*arguments, stdin=json.dumps(with_registry(self.values)))

    def uninstall(self) -> None:
        self.helm("uninstall", self.release, "--wait", "--timeout", "3m")

    # ---- kubectl

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.namespace, *arguments, stdin=stdin)

    def apply(self, manifest: Object | Path) -> None:
        text = manifest.read_text() if isinstance(manifest, Path) else yaml.safe_dump(manifest)
        self.kubectl("apply", "--filename", "-", stdin=text)

    def get(self, kind: str, name: str) -> Object | None:
        text = self.kubectl("get", kind, name, "--ignore-not-found", "--output", "json")
        found: Object | None = json.loads(text) if text.strip() else None
        return found

    def list(self, kind: str, selector: str) -> list[Object]:
        found: list[Object] = json.loads(self.kubectl("get", kind, "-l", selector, "--output", "json"))["items"]
        return found

    def patch(self, kind: str, name: str, patch: Object) -> None:
        self.kubectl("patch", kind, name, "--type", "merge", "--patch", json.dumps(patch))

    def evict(self, pod: str) -> None:
        """Evict a pod as a drain does. Raises ClusterError where a budget keeps the pod."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        self.cluster.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(eviction))

    def key_in(self, secret: str) -> str:
        """Return the API key that the operator made, from its Secret."""
        encoded = self.kubectl("get", "secret", secret, "--output=jsonpath={.data.key}")
        return base64.b64decode(encoded).decode()

    # ---- sessions

    def condition(self, name: str, type: str = "Ready", *, kind: str = "trainingsession") -> Object:
        """Return the condition of a session or pool, or an empty one until it speaks of the present spec."""
        found = self.get(kind, name) or {}
        conditions = (found.get("status") or {}).get("conditions") or []
        generation = found.get("metadata", {}).get("generation")
        of_type = (condition for condition in conditions if condition["type"] == type)
        return next((condition for condition in of_type if condition["observedGeneration"] == generation), {})

    def wait_ready(self, session: str, timeout_seconds: float = 420) -> None:
        self.wait_reason(session, "WorkerReady", timeout_seconds)

    def wait_reason(
        self, name: str, reason: str, timeout_seconds: float = 300, *, kind: str = "trainingsession"
    ) -> str:
        """Wait until the Ready condition of a session or pool has this reason, and return its message."""

        def reached() -> str | None:
            condition = self.condition(name, kind=kind)
            return condition["message"] if condition.get("reason") == reason else None

        return wait_for(
            reached, timeout_seconds, lambda: f"{name} waits for {reason}: {self.condition(name, kind=kind)}"
        )

    # ---- the server

    @property
    def url(self) -> str:
        if not self.by_node_port:
            return self.cluster.ingress_url
        service, port = f"{self.release}-api-server", "--output=jsonpath={.spec.ports[0].nodePort}"
        return f"{self.cluster.ingress_url}:{self.kubectl('get', 'service', service, port)}"

    def wait_answering(self, timeout_seconds: float = 240) -> None:
        """Wait until the ingress reaches the API server."""

        def answers() -> bool:
            try:
                answer = httpx.get(f"{self.url}/api/v1/healthz", trust_env=False, verify=False, timeout=5)
                return answer.status_code == 200
            except httpx.TransportError:
                return False

        wait_for(answers, timeout_seconds, lambda: f"{self.url} does not answer")

    def connect(self) -> tinker.ServiceClient:
        """Open a Tinker session, which the caller closes."""
        return tinker.ServiceClient(base_url=self.url, api_key=self.api_key)

    @contextmanager
    def service_client(self) -> Iterator[tinker.ServiceClient]:
        """Yield a Tinker session, which ends with the block."""
        client = self.connect()
        try:
            yield client
        finally:
            # The SDK waits for its heartbeat to end. One that is in an error of its own when it is cancelled misses
            # that, and beats on; the server has finished the session by then. Seen once, 10.0 s after its beginning.
            with suppress(TimeoutError):
                client.close("success").result(timeout=CLOSE_SECONDS)

    def an_api_server(self) -> str | None:
        """Return an API server's pod that runs and stays, or None while the last ones have no successors yet."""
        pods = self.list("pod", API_SERVER)
        return next((pod["metadata"]["name"] for pod in pods if stays(pod)), None)

    def kill_api_servers(self, count: int) -> None:
        """Kills so many of their processes, and takes the pods away.

        A pod deleted without grace is gone for the API server at once, and its process answers a while longer those
        who are connected to it.
        """
        self.kubectl("rollout", "status", f"deployment/{self.release}-api-server", "--timeout=300s")
        pods = [pod["metadata"]["name"] for pod in self.list("pod", API_SERVER) if stays(pod)][:count]
        assert len(pods) == count, f"of {count} API servers {len(pods)} run"
        for pod in pods:
            self.cluster.kill_container(self.namespace, pod, "api-server")
        self.kubectl("delete", "pod", *pods, "--grace-period=0", "--force")

    def fetch_checkpoint_folder(self, folder: str, target: Path) -> Path:
        """Copy the only directory below a folder of the checkpoint root out of the API server's pod."""
        pod = wait_for(self.an_api_server, 120, lambda: "no API server runs whose volume could be read")
        archive = self.cluster.kubectl_bytes(
            "--namespace", self.namespace, "exec", pod, "--", "tar", "-C", f"{CHECKPOINTS}/{folder}", "-c", "."
        )
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            extract_files(files, target)
        [directory] = [entry for entry in target.iterdir() if entry.is_dir()]
        return directory


def stays(pod: Object) -> bool:
    """Return true if the pod runs and is not being replaced.

    A pod that ends says `Running` until its containers are gone.
    """
    return pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]


def wait_for(probe: Callable[[], T | None], timeout_seconds: float, what: Callable[[], str]) -> T:
    """Return the probe's first true answer. `what` names, in the error after the timeout, what did not come."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        trouble = None
        try:
            if found := probe():
                return found
        except ClusterError as error:  # one of many calls to a busy API server; it is asked again
            trouble = error
        assert time.monotonic() < deadline, f"not within {timeout_seconds:.0f} s: {trouble or what()}"
        time.sleep(POLL_SECONDS)
