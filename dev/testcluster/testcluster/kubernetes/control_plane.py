"""The control plane: etcd, the API server, the controller manager, and the scheduler if the cluster has nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from testcluster.commands import attempt
from testcluster.kubernetes.certificates import Authority, Pair, create_signing_key
from testcluster.kubernetes.network import POD_RANGE, SERVICE_RANGE
from testcluster.places import Places
from testcluster.processes import ProcessTable

FIRST_SERVICE_ADDRESS = "10.96.0.1"
# Longer than two reports of the kubelet, but short enough for a test that waits for a lost node.
NODE_GRACE_SECONDS = 16
_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")


@dataclass(frozen=True)
class ControlPlane:
    """The address and the network namespace of the control plane.

    The namespace None means the network namespace of the host.
    """

    places: Places
    programs: Path
    authority: Authority
    address: str
    ports: Sequence[int]
    namespace: Path | None

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.ports[0]}"

    @property
    def table(self) -> ProcessTable:
        return ProcessTable(self.places)

    def start_api(self) -> None:
        """Start etcd and the API server. Return when the API server answers."""
        self.places.certificates.mkdir(parents=True, exist_ok=True)
        admin = self.authority.issue("admin", "tinsmith-test-admin", groups=("system:masters",))
        self.authority.kubeconfig(self.places.kubeconfig, self.server, admin)
        create_signing_key(self._signing_key)
        self.table.start("etcd", self._etcd(), network=self.namespace)
        self.table.start("kube-apiserver", self._api_server(admin), network=self.namespace)
        self.table.wait_until("the API server answers", self._answers, needs=["etcd", "kube-apiserver"])

    def start_controllers(self, *, scheduler: bool) -> None:
        manager = self.component_kubeconfig("kube-controller-manager", "system:kube-controller-manager")
        self.table.start("kube-controller-manager", self._controller_manager(manager), network=self.namespace)
        if scheduler:
            kubeconfig = self.component_kubeconfig("kube-scheduler", "system:kube-scheduler")
            self.table.start("kube-scheduler", self._scheduler(kubeconfig), network=self.namespace)

    def wait_for_controllers(self) -> None:
        """Wait until the controllers have created the service account.

        Without a service account, a namespace accepts no pods.
        """
        self.table.wait_until(
            "the controllers work",
            lambda: self._kubectl("get", "serviceaccount", "default", "--namespace=default").returncode == 0,
            needs=["kube-controller-manager"],
        )

    @property
    def _signing_key(self) -> Path:
        return self.places.certificates / "service-accounts.key"

    def component_kubeconfig(self, name: str, user: str, *, groups: tuple[str, ...] = ()) -> Path:
        pair = self.authority.issue(name, user, groups=groups)
        return self.authority.kubeconfig(self.places.certificates / f"{name}.kubeconfig", self.server, pair)

    def _answers(self) -> bool:
        return self._kubectl("get", "--raw=/readyz", "--request-timeout=2s").returncode == 0

    def _kubectl(self, *words: str) -> CompletedProcess[str]:
        return attempt(self.programs / "kubectl", f"--kubeconfig={self.places.kubeconfig}", *words)

    def _etcd(self) -> list[str]:
        client, peer = (f"http://127.0.0.1:{port}" for port in self.ports[1:3])
        return [
            "etcd",
            f"--data-dir={self.places.directory / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # The data need not survive a power failure.
            "--unsafe-no-fsync",
            # Otherwise a watch without a start version, on a kind that does not change, waits for minutes and fails.
            "--experimental-watch-progress-notify-interval=2s",
            "--logger=zap",
            "--log-level=warn",
        ]

    def _api_server(self, kubelet_client: Pair) -> list[str]:
        hosts = (self.address, "127.0.0.1", FIRST_SERVICE_ADDRESS, "localhost", *_NAMES)
        serving = self.authority.issue("kube-apiserver", "kube-apiserver", hosts=hosts)
        # Servers of additional APIs, such as metrics for autoscalers, believe this certificate which user has sent a
        # request.
        front_proxy = self.authority.issue("front-proxy", "front-proxy")
        # The Service `kubernetes` may not have a loopback address as its endpoint.
        endpoints = "none" if self.address.startswith("127.") else "lease"
        return [
            str(self.programs / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{self.ports[1]}",
            f"--bind-address={'127.0.0.1' if endpoints == 'none' else '0.0.0.0'}",
            f"--advertise-address={FIRST_SERVICE_ADDRESS if endpoints == 'none' else self.address}",
            f"--endpoint-reconciler-type={endpoints}",
            f"--secure-port={self.ports[0]}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={self.authority.file}",
            f"--kubelet-certificate-authority={self.authority.file}",
            f"--kubelet-client-certificate={kubelet_client.certificate}",
            f"--kubelet-client-key={kubelet_client.key}",
            f"--proxy-client-cert-file={front_proxy.certificate}",
            f"--proxy-client-key-file={front_proxy.key}",
            f"--requestheader-client-ca-file={self.authority.file}",
            "--requestheader-allowed-names=front-proxy",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            # Otherwise `kubectl exec` and `kubectl logs` look up the node's name in DNS.
            "--kubelet-preferred-address-types=InternalIP",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged",
            "--anonymous-auth=false",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={self._signing_key}",
            f"--service-account-signing-key-file={self._signing_key}",
            f"--cert-dir={self.places.certificates / 'generated'}",
            "--profiling=false",
        ]

    def _controller_manager(self, kubeconfig: Path) -> list[str]:
        return [
            str(self.programs / "kube-controller-manager"),
            f"--kubeconfig={kubeconfig}",
            "--leader-elect=false",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self._signing_key}",
            f"--root-ca-file={self.authority.file}",
            f"--cluster-cidr={POD_RANGE}",
            # Each node gets the address range of its pods from this package.
            "--allocate-node-cidrs=false",
            # Otherwise the controller manager pauses for five seconds while it starts.
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            f"--node-monitor-grace-period={NODE_GRACE_SECONDS}s",
            f"--secure-port={self.ports[3]}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.places.certificates / 'generated'}",
            "--profiling=false",
        ]

    def _scheduler(self, kubeconfig: Path) -> list[str]:
        return [
            str(self.programs / "kube-scheduler"),
            f"--kubeconfig={kubeconfig}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.places.certificates / 'generated'}",
            "--profiling=false",
        ]


def inside_ports() -> Sequence[int]:
    """Return the well-known ports.

    The well-known ports are free, because the control plane has a separate network namespace.
    """
    return 6443, 2379, 2380, 10257
