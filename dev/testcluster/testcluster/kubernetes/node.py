"""A node: containerd, the kubelet and kube-proxy. Each node has separate folders, sockets and a separate network."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from testcluster.commands import attempt
from testcluster.kubernetes import cgroups
from testcluster.kubernetes.containerd import Containerd
from testcluster.kubernetes.control_plane import ControlPlane
from testcluster.kubernetes.network import POD_RANGE, Network
from testcluster.places import Places
from testcluster.policies import plugin
from testcluster.processes import ProcessTable, end
from testcluster.programs.archives import PAUSE_IMAGE

DNS_SERVICE_ADDRESS = "10.96.0.10"
CNI_PROGRAMS = Path("/usr/lib/cni")
_POLICIES = "tinsmith-policies"


@dataclass(frozen=True)
class Node:
    """The node `number` of a cluster. The first node has the number 1."""

    places: Places
    network: Network
    number: int

    @property
    def name(self) -> str:
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        return self.network.address(self.number)

    @property
    def directory(self) -> Path:
        return self.places.node(self.number)

    @property
    def socket(self) -> Path:
        return self.directory / "containerd.sock"

    @property
    def containerd(self) -> Containerd:
        return Containerd(("ctr", f"--address={self.socket}"))

    @property
    def cgroup(self) -> str:
        return cgroups.root_name(self.places.name, self.number)

    def process(self, program: str) -> str:
        """Return the name of this node's `program` in the cluster's process table."""
        return f"{program}-{self.number}"

    @property
    def processes(self) -> tuple[str, str, str]:
        return self.process("containerd"), self.process("kubelet"), self.process("kube-proxy")

    def start_containerd(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "cni").mkdir(exist_ok=True)
        _write_json(self.directory / "cni" / "10-pods.conflist", self._cni_settings())
        self._gather_cni_programs()
        settings = self.directory / "containerd.toml"
        settings.write_text(self._containerd_settings())
        cgroups.create(self.cgroup)
        self._start("containerd", ["containerd", f"--config={settings}"])
        self._table.wait_until(
            f"containerd of {self.name} answers",
            lambda: attempt("ctr", f"--address={self.socket}", "version").returncode == 0,
            needs=[self.process("containerd")],
        )

    def start_agents(self, control_plane: ControlPlane) -> None:
        """Start the kubelet and kube-proxy. The node is ready some seconds later."""
        self._start("kubelet", self._kubelet(control_plane))
        self._start("kube-proxy", self._proxy(control_plane))

    def disconnect(self) -> None:
        self.network.set_cable(self.number, "down")

    def reconnect(self) -> None:
        self.network.set_cable(self.number, "up")

    def power_off(self) -> None:
        """Kill the agents, which would restart pods, and then all other processes.

        Containerd's shims remain, without containers.
        """
        self.disconnect()
        self._table.stop(*self.processes)
        end(cgroups.processes(self.cgroup))

    @property
    def _table(self) -> ProcessTable:
        return ProcessTable(self.places)

    def _start(self, program: str, command: list[str]) -> None:
        self._table.start(self.process(program), command, network=self.network.namespace(self.number))

    def _kubelet(self, control_plane: ControlPlane) -> list[str]:
        kubeconfig = control_plane.component_kubeconfig(
            f"kubelet-{self.number}", f"system:node:{self.name}", groups=("system:nodes",)
        )
        serving = control_plane.authority.issue(
            f"kubelet-{self.number}-serving", self.name, hosts=(self.name, self.address)
        )
        settings = self._kubelet_settings() | {
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(control_plane.authority.file)},
            },
            "tlsCertFile": str(serving.certificate),
            "tlsPrivateKeyFile": str(serving.key),
        }
        return [
            str(control_plane.programs / "kubelet"),
            f"--config={_write_json(self.directory / 'kubelet.json', settings)}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={self.directory / 'kubelet'}",
            f"--cert-dir={self.directory / 'kubelet-certificates'}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
        ]

    def _kubelet_settings(self) -> dict[str, object]:
        resolver = self.directory / "resolv.conf"
        resolver.write_text(f"nameserver {DNS_SERVICE_ADDRESS}\n")
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "0.0.0.0",
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "clusterDNS": [DNS_SERVICE_ADDRESS],
            "clusterDomain": "cluster.local",
            "resolvConf": str(resolver),
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            # Disks of developers are often full, and images that were loaded by hand cannot be pulled again.
            "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "nodeStatusUpdateFrequency": "4s",
            "podLogsDir": str(self.directory / "pod-logs"),
            "volumePluginDir": str(self.directory / "volume-plugins"),
            "enableProfilingHandler": False,
        }

    def _proxy(self, control_plane: ControlPlane) -> list[str]:
        kubeconfig = control_plane.component_kubeconfig(f"kube-proxy-{self.number}", "system:kube-proxy")
        settings: dict[str, object] = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "clusterCIDR": POD_RANGE,
            "hostnameOverride": self.name,
            "metricsBindAddress": "127.0.0.1:10249",
            # The connection tracking table belongs to the machine, and this package does not change the machine's
            # sysctl settings.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }
        return [
            str(control_plane.programs / "kube-proxy"),
            f"--config={_write_json(self.directory / 'kube-proxy.json', settings)}",
        ]

    def _cni_settings(self) -> dict[str, object]:
        """Return settings that give each pod one link, without a bridge.

        Without a bridge, all traffic passes the rules of Services.
        """
        addresses = {
            "type": "host-local",
            "dataDir": str(self.directory / "cni-addresses"),
            "ranges": [[{"subnet": self.network.pods(self.number)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        plugins = [
            {"type": "ptp", "ipam": addresses},
            {"type": "portmap", "capabilities": {"portMappings": True}},
            {"type": _POLICIES, "socket": str(self.places.policies_socket)},
        ]
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}

    def _gather_cni_programs(self) -> None:
        """Link the machine's CNI programs and the policy plugin into the only folder that containerd reads."""
        programs = self.directory / "cni-programs"
        programs.mkdir(exist_ok=True)
        for program in CNI_PROGRAMS.iterdir():
            (programs / program.name).symlink_to(program)
        own_plugin = programs / _POLICIES
        own_plugin.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S '{plugin.__file__}'\n")
        own_plugin.chmod(0o755)

    def _containerd_settings(self) -> str:
        # restrict_oom_score_adj: without CAP_SYS_RESOURCE every pod would fail to start.
        return f"""\
version = 2
root = "{self.directory / "containerd"}"
state = "{self.directory / "containerd-state"}"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
]
[grpc]
  address = "{self.socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{self.directory / "containerd-opt"}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{self.directory / "cni-programs"}"
    conf_dir = "{self.directory / "cni"}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      Root = "{self.directory / "runc"}"
"""


def _write_json(file: Path, document: dict[str, object]) -> Path:
    file.write_text(json.dumps(document, indent=2) + "\n")
    return file
