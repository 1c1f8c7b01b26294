"""The services of a cluster besides Kubernetes itself: DNS, ingress, storage classes, and NetworkPolicy enforcement."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template

from testcluster.commands import attempt, run
from testcluster.kubernetes.node import Node
from testcluster.places import Places
from testcluster.processes import ProcessTable
from testcluster.programs.builds import COREDNS, TRAEFIK, built

MANIFESTS = Path(__file__).parent / "manifests"
_IMPORT_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Services:
    places: Places
    kubectl: Path

    @property
    def _table(self) -> ProcessTable:
        return ProcessTable(self.places)

    def apply(self, manifest: str, **values: str) -> None:
        """Replace the placeholders `${…}` in a file of `manifests/`, and apply the result."""
        document = Template((MANIFESTS / manifest).read_text()).substitute(values)
        kubeconfig = f"--kubeconfig={self.places.kubeconfig}"
        run(self.kubectl, kubeconfig, "apply", "--server-side", "--filename=-", stdin=document)

    def start_dns(self, node: Node) -> None:
        corefile = self.places.directory / "Corefile"
        corefile.write_text(
            f".:53 {{\n"
            f"  bind {node.address}\n"
            f"  errors\n"
            f"  ready 127.0.0.1:8181\n"
            f"  kubernetes cluster.local in-addr.arpa {{\n"
            f"    kubeconfig {self.places.kubeconfig}\n"
            f"    ttl 1\n"
            f"  }}\n"
            f"}}\n"
        )
        command: list[str | Path] = [built(COREDNS) / "coredns", f"-conf={corefile}"]
        self._table.start("coredns", command, network=_namespace(node))
        self.apply("dns.yaml", NODE_ADDRESS=node.address)

    def start_ingress(self, node: Node) -> None:
        self.apply("ingress-class.yaml")
        command: list[str | Path] = [
            built(TRAEFIK) / "traefik",
            "--entrypoints.web.address=:80",
            "--entrypoints.websecure.address=:443",
            "--entrypoints.websecure.http.tls=true",
            "--entrypoints.traefik.address=127.0.0.1:8082",
            "--ping=true",
            "--providers.kubernetesingress=true",
            "--providers.kubernetesingress.throttleduration=100ms",
            # A Service without endpoints answers 503, which clients retry, and not 404, which clients accept as final.
            "--providers.kubernetesingress.allowemptyservices=true",
            f"--providers.kubernetesingress.ingressendpoint.ip={node.address}",
            "--providers.providersthrottleduration=100ms",
            "--global.checknewversion=false",
            "--global.sendanonymoususage=false",
            "--log.level=INFO",
            "--log.nocolor=true",
        ]
        environment = {"KUBECONFIG": str(self.places.kubeconfig)}
        self._table.start("traefik", command, environment=environment, network=_namespace(node))

    def start_storage(self) -> None:
        self.places.volumes.mkdir(exist_ok=True)
        module = [sys.executable, "-m", "testcluster.kubernetes.provisioner"]
        command: list[str | Path] = [*module, self.places.kubeconfig, self.places.volumes]
        environment = {"PYTHONPATH": str(_IMPORT_ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        self._table.start("provisioner", command, environment=environment)

    def start_policies(self, nodes: Sequence[Node]) -> None:
        """Start the enforcement of policies.

        Call this before the kubelets start, because a pod starts only if its policies are in force.
        """
        module = [sys.executable, "-m", "testcluster.policies.enforcer"]
        namespaces = [_namespace(node) for node in nodes]
        command: list[str | Path] = [*module, self.places.kubeconfig, self.places.policies_socket, *namespaces]
        environment = {"PYTHONPATH": str(_IMPORT_ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        self._table.start("policies", command, environment=environment)

    def wait_until_ready(self, node: Node) -> None:
        """Wait until DNS, the ingress and the enforcement of policies work."""
        for name, address in (("coredns", "127.0.0.1:8181/ready"), ("traefik", "127.0.0.1:8082/ping")):
            self._table.wait_until(f"{name} is ready", partial(_answers, node, address), needs=[name])
        self._table.wait_until("policies are enforced", self.places.policies_socket.exists, needs=["policies"])


def _namespace(node: Node) -> Path:
    return node.network.namespace(node.number)


def _answers(node: Node, address: str) -> bool:
    command = ["curl", "--fail", "--silent", "--output", "/dev/null", f"http://{address}"]
    return attempt("nsenter", f"--net={_namespace(node)}", *command).returncode == 0
