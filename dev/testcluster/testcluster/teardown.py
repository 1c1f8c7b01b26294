"""The stop of a cluster that fully or partly runs: processes, containers, mounts, network, cgroups and folders."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

from testcluster.commands import attempt, run
from testcluster.errors import ClusterError
from testcluster.kubernetes import cgroups
from testcluster.kubernetes.network import claimed
from testcluster.kubernetes.node import Node
from testcluster.places import Places, clusters_directory
from testcluster.processes import ProcessTable, end, marked

MOST_NODES = 2
_LOG_LINKS = Path("/var/log/containers")
_KUBELET_FOLDER = Path("/var/lib/kubelet")


def take_down(places: Places, *, keep_logs: bool = False) -> None:
    """Remove everything that belongs to the cluster. On request, keep the logs of the cluster.

    If the cluster does not exist, do nothing.

    Raises ClusterError if a process or a mount remains. After a ClusterError, this function can be called again.
    """
    places.record.unlink(missing_ok=True)
    network = claimed(places)
    nodes = [] if network is None else [Node(places, network, number) for number in range(1, MOST_NODES + 1)]
    _stop_agents(places)
    for node in nodes:
        _delete_containers(node)
    _stop_rest(places, nodes)
    _unmount(places.directory)
    for node in nodes:
        cgroups.delete(node.cgroup)
    if network is not None:
        network.delete()
        _remove_what_lies_elsewhere(places.directory)
    _remove(places, keep_logs=keep_logs)


def _stop_agents(places: Places) -> None:
    """Stop the agents of the nodes. The agents that restart pods are stopped first."""
    table = ProcessTable(places)
    agents = [name for name in table.names() if name.startswith(("kubelet-", "kube-proxy-", "provisioner"))]
    table.stop(*agents)


def _delete_containers(node: Node) -> None:
    """Delete the containers.

    If containerd answers, containerd deletes the containers, because the shims then also remove their sockets.

    The sockets of shims are outside the cluster's folders.
    """
    table, name = ProcessTable(node.places), node.process("containerd")
    if name not in table.names() or not table.is_alive(name):
        return
    ctr = ["ctr", f"--address={node.socket}", "--namespace=k8s.io", "--timeout=60s"]
    listed = attempt(*ctr, "tasks", "list", "--quiet")
    if listed.returncode == 0 and (tasks := listed.stdout.split()):
        attempt(*ctr, "tasks", "delete", "--force", *tasks)


def _stop_rest(places: Places, nodes: list[Node]) -> None:
    """Stop all remaining processes: members of nodes' control groups, and descendants of the cluster's processes."""
    table = ProcessTable(places)
    table.stop(*table.names())
    end(marked(places.directory))
    for node in nodes:
        end(cgroups.processes(node.cgroup))


def _unmount(directory: Path) -> None:
    """Unmount everything below the directory. Inner mounts are unmounted first."""
    for mount in sorted(mounts_below(directory, Path("/proc/self/mountinfo").read_text()), reverse=True):
        run("umount", "--lazy", mount)
    if left := mounts_below(directory, Path("/proc/self/mountinfo").read_text()):
        raise ClusterError(f"{left[0]} is still mounted, so {directory} is not removed.")


def mounts_below(directory: Path, mountinfo: str) -> list[str]:
    """Return the mount points below the directory.

    A mount point with several mounts is listed once for each mount.
    """
    points = [re.sub(r"\\([0-7]{3})", _unescaped, line.split()[4]) for line in mountinfo.splitlines()]
    return [point for point in points if Path(point).is_relative_to(directory)]


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))


def _remove_what_lies_elsewhere(directory: Path) -> None:
    """Remove sockets and links that containerd and the kubelet create at fixed paths outside the cluster's folders."""
    for address in directory.glob("node-*/containerd-state/io.containerd.runtime.v2.task/*/*/address"):
        Path(address.read_text().removeprefix("unix://")).unlink(missing_ok=True)
    if _LOG_LINKS.is_dir():
        for link in _LOG_LINKS.iterdir():
            # The kubelet of another cluster removes links without a target.
            with contextlib.suppress(FileNotFoundError):
                if link.is_symlink() and link.readlink().is_relative_to(directory):
                    link.unlink()
    if not any(clusters_directory().glob("*/processes/kubelet-*.json")):
        _remove_kubelet_folder()


def _remove_kubelet_folder() -> None:
    """Remove the folder of the kubelet if it contains only files that the kubelet of a test cluster writes.

    A folder with other files belongs to a real kubelet.
    """
    plugins = _KUBELET_FOLDER / "device-plugins"
    if list(_KUBELET_FOLDER.rglob("*")) in ([], [plugins], [plugins, plugins / "kubelet.sock"]):
        shutil.rmtree(_KUBELET_FOLDER, ignore_errors=True)


def _remove(places: Places, *, keep_logs: bool) -> None:
    if not places.directory.exists():
        return
    for entry in places.directory.iterdir():
        if keep_logs and entry == places.logs:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if not keep_logs:
        places.directory.rmdir()
