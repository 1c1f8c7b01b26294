"""The two operators that `operator_scale.py` compares: their processes, objects and metrics."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from operator_scale_api import Manifest
from support.kubernetes.crds import install_crds
from testcluster.addons.kuberay import install_kuberay_kinds
from testcluster.cluster import Cluster
from testcluster.programs.builds import KUBERAY, built
from tinsmith_operator.settings import Settings
from typing_extensions import override

INSTALLATION = "scale"
IMAGE = "registry.example/tinsmith-trainer:0.1.0"
RESOURCES = {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"cpu": "4", "memory": "32Gi"}}
SOURCE = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "models", "path": "qwen"}}
MODEL = {"name": "Qwen/Qwen3-8B", "source": SOURCE}
REPLICAS = 2
SELDOM_SECONDS = 3600
WRITES = frozenset({"create", "patch", "update", "delete", "post", "put"})

Requests = dict[str, int]
"""The number of requests, by `verb resource code`."""


@dataclass(frozen=True)
class Load:
    """The size of a run. `rate` and `burst` are the client's limits, in requests a second and requests at once."""

    sessions: int
    pools: int
    namespaces: int
    rate: float
    burst: int
    reconciles: int

    def namespace(self, prefix: str, number: int) -> str:
        return f"{prefix}-{number % self.namespaces:02d}"


@dataclass(frozen=True)
class Wanted:
    """An object to create: the path of its list, and the manifest."""

    path: str
    manifest: Manifest


class Side(ABC):
    """One operator. `owners` and `workloads` are the paths of lists of all namespaces."""

    name: str
    prefix: str
    owners: tuple[str, ...]
    workloads: tuple[tuple[str, str], ...]
    """The lists of the last objects that the operator creates for each owner, with a label selector."""
    service_label: str
    calls_workers = False

    def __init__(self, cluster: Cluster, load: Load, directory: Path, port: int) -> None:
        self.cluster = cluster
        self.load = load
        self.directory = directory
        self.port = port

    @abstractmethod
    def install(self) -> None:
        """Install the kinds of the operator."""

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def environment(self) -> dict[str, str]: ...

    @abstractmethod
    def objects(self) -> Iterator[Wanted]: ...

    @abstractmethod
    def is_ready(self, owner: Manifest) -> bool: ...

    @abstractmethod
    def acts(self, page: str) -> bool:
        """Return whether the operator has started, according to its metrics."""

    @abstractmethod
    def reconciled(self, page: str) -> int:
        """Return how many owners have been reconciled since the start, or 0 while some wait."""

    @abstractmethod
    def requests(self, page: str) -> Requests: ...

    @abstractmethod
    def restarts(self) -> None:
        """Change the settings for the phases after the first restart."""

    def start(self) -> subprocess.Popen[bytes]:
        log = (self.directory / f"{self.prefix}.log").open("ab")
        environment = os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig)} | self.environment()
        return subprocess.Popen(self.command(), env=environment, stdout=log, stderr=subprocess.STDOUT)

    def page(self) -> str:
        """Return the metrics, or an empty text while the operator does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
                text: str = answer.read().decode()
        except OSError:
            return ""
        return text


class Tinsmith(Side):
    """The project's operator. Each TrainingSession has one worker, and each SamplerPool two replicas."""

    name = "Tinsmith"
    prefix = "team"
    owners = ("/apis/tinsmith.dev/v1alpha1/trainingsessions", "/apis/tinsmith.dev/v1alpha1/samplerpools")
    workloads = (("/apis/apps/v1/statefulsets", ""), ("/apis/apps/v1/deployments", ""))
    service_label = "app.kubernetes.io/managed-by=tinsmith-operator"
    calls_workers = True

    def __init__(self, cluster: Cluster, load: Load, directory: Path, port: int, workers_port: int) -> None:
        super().__init__(cluster, load, directory, port)
        self.workers_port = workers_port
        self.describe_seconds = SELDOM_SECONDS

    @override
    def restarts(self) -> None:
        """Call each worker once a minute from now on. The phases before measure the operator without these calls."""
        self.describe_seconds = Settings.model_fields["describe_seconds"].default

    @override
    def install(self) -> None:
        install_crds(self.cluster.kubectl)
        self.cluster.kubectl("create", "namespace", INSTALLATION)

    @override
    def command(self) -> list[str]:
        program = Path(__file__).with_name("operator_scale_program.py")
        return [sys.executable, str(program), str(self.directory), str(self.workers_port)]

    @override
    def environment(self) -> dict[str, str]:
        settings = {
            "namespace": INSTALLATION,
            "watch_namespaces": "*",
            "trainer_image": IMAGE,
            "checkpoint_root": "s3://bucket/checkpoints",
            "max_requests_per_second": self.load.rate,
            "burst": self.load.burst,
            "concurrent_reconciles": self.load.reconciles,
            "describe_seconds": self.describe_seconds,
            "health_port": 0,
            "metrics_port": self.port,
        }
        return {f"TINSMITH_OPERATOR_{name.upper()}": str(value) for name, value in settings.items()}

    @override
    def objects(self) -> Iterator[Wanted]:
        for number in range(self.load.sessions):
            yield self._wanted("TrainingSession", f"s{number:04d}", number, {})
        for number in range(self.load.pools):
            yield self._wanted("SamplerPool", f"p{number:04d}", number, {"replicas": REPLICAS})

    def _wanted(self, kind: str, name: str, number: int, spec: Manifest) -> Wanted:
        namespace = self.load.namespace(self.prefix, number)
        spec = {"model": MODEL, "resources": RESOURCES, **spec}
        path = f"/apis/tinsmith.dev/v1alpha1/namespaces/{namespace}/{kind.lower()}s"
        manifest = {"apiVersion": "tinsmith.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        return Wanted(path, manifest)

    @override
    def is_ready(self, owner: Manifest) -> bool:
        conditions = owner.get("status", {}).get("conditions", [])
        return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)

    @override
    def acts(self, page: str) -> bool:
        return "tinsmith_operator_leader 1.0" in page

    @override
    def reconciled(self, page: str) -> int:
        settled = re.search(r'^tinsmith_operator_reconciles_total{result="settled"} (\S+)', page, re.M)
        return int(float(settled[1])) if settled and "tinsmith_operator_queue_depth 0.0" in page else 0

    @override
    def requests(self, page: str) -> Requests:
        pattern = r'^tinsmith_operator_api_requests_total{code="([^"]*)",resource="([^"]*)",verb="([^"]*)"} (\S+)'
        found = re.findall(pattern, page, re.M)
        return {
            f"{verb} {resource} {code}": int(float(count))
            for code, resource, verb, count in found
            if resource != "leases" and verb != "watch"
        }


class KubeRay(Side):
    """KubeRay's operator. Each RayCluster has a head and no workers, the least that it makes."""

    name = "KubeRay 1.6"
    prefix = "ray"
    owners = ("/apis/ray.io/v1/rayclusters",)
    workloads = (("/api/v1/pods", "ray.io/node-type=head"),)
    service_label = "app.kubernetes.io/created-by=kuberay-operator"

    @override
    def install(self) -> None:
        install_kuberay_kinds(self.cluster.kubectl)

    @override
    def command(self) -> list[str]:
        limits = [f"--qps={self.load.rate}", f"--burst={self.load.burst}"]
        options = ["--health-probe-bind-address=0", "--enable-leader-election=false"]
        program = str(built(KUBERAY) / "ray-operator")
        return [program, f"--metrics-addr=127.0.0.1:{self.port}", *limits, *options]

    @override
    def environment(self) -> dict[str, str]:
        return {}

    @override
    def objects(self) -> Iterator[Wanted]:
        head = {"containers": [{"name": "ray-head", "image": IMAGE, "resources": RESOURCES}]}
        spec = {"rayVersion": "2.50.0", "headGroupSpec": {"rayStartParams": {}, "template": {"spec": head}}}
        for number in range(self.load.sessions + self.load.pools):
            path = f"/apis/ray.io/v1/namespaces/{self.load.namespace(self.prefix, number)}/rayclusters"
            metadata = {"name": f"r{number:04d}"}
            yield Wanted(path, {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec})

    @override
    def restarts(self) -> None:
        """Keep the settings."""

    @override
    def is_ready(self, owner: Manifest) -> bool:
        return bool(owner.get("status", {}).get("state") == "ready")

    @override
    def acts(self, page: str) -> bool:
        return "rest_client_requests_total" in page

    @override
    def reconciled(self, page: str) -> int:
        total = re.findall(r'^controller_runtime_reconcile_total{controller="raycluster[^}]*} (\S+)', page, re.M)
        depth = re.search(r'^workqueue_depth{controller="raycluster[^}]*} (\S+)', page, re.M)
        return int(sum(map(float, total))) if depth and float(depth[1]) == 0 else 0

    @override
    def requests(self, page: str) -> Requests:
        pattern = r'^rest_client_requests_total{code="(\d+)",host="[^"]*",method="(\w+)"} (\S+)'
        found = re.findall(pattern, page, re.M)
        return {f"{method.lower()} all {code}": int(float(count)) for code, method, count in found}


def writes(requests: Requests) -> int:
    """Return the number of writes. A refused write counts."""
    return sum(count for call, count in requests.items() if call.partition(" ")[0] in WRITES)
