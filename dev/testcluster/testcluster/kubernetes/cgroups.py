"""The control groups of nodes.

Each node has one control group. The control group of a node contains all processes of the pods on the node.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from testcluster.processes import Running, end, identify

_COPIED_FROM_PARENT = ("cpuset.cpus", "cpuset.mems")
# Four times the default, for cgroup versions 1 and 2.
_WEIGHTS = (("cpu.shares", "4096"), ("cpu.weight", "400"))
_DELETE_SECONDS = 20.0


def root_name(cluster: str, node: int) -> str:
    return f"tinsmith-{cluster}-{node}"


def create(name: str) -> None:
    """Create the group in each hierarchy that the kubelet reads."""
    for hierarchy in _hierarchies():
        if _is_unified(hierarchy):
            _delegate(hierarchy)
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        # A new cpuset has no processors, and accepts no process until it has some.
        for file in _COPIED_FROM_PARENT:
            if (hierarchy / file).exists() and not _is_unified(hierarchy):
                (group / file).write_text((hierarchy / file).read_text())
        # By default, all pods of the node together would weigh as much as one busy program of the host.
        for file, weight in _WEIGHTS:
            if (group / file).exists():
                (group / file).write_text(weight)


def processes(name: str) -> list[Running]:
    """Return the processes in the group and in all groups below this group."""
    pids: set[int] = set()
    for hierarchy in _mounted():
        for folder, _, _ in os.walk(hierarchy / name):  # this function ignores a folder that vanishes
            with contextlib.suppress(OSError):
                pids.update(int(line) for line in Path(folder, "cgroup.procs").read_text().split())
    return [running for pid in pids if (running := identify(pid)) is not None]


def delete(name: str) -> None:
    """Delete the group and all groups below this group. All processes in the groups must have ended.

    Raises OSError if the kernel refuses the deletion, and ClusterError if a process remains.
    """
    deadline = time.monotonic() + _DELETE_SECONDS
    while True:
        try:
            _delete_now(name)
        except OSError:
            if time.monotonic() > deadline:
                raise
            end(processes(name))
            time.sleep(0.1)
        else:
            return


def _delete_now(name: str) -> None:
    for hierarchy in _mounted():
        group = hierarchy / name
        if not group.is_dir():
            continue
        below = sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True)
        for folder in (*below, group):
            folder.rmdir()


def _hierarchies() -> list[Path]:
    """Return the hierarchies of control groups.

    Version 1 has a hierarchy for each controller; version 2 has one hierarchy for all controllers.
    """
    mounted = _mounted()
    return [path for path in mounted if not _is_unified(path)] or mounted


def _mounted() -> list[Path]:
    """Return the mounted hierarchies.

    Version 1 may be mounted together with an empty hierarchy of version 2. Groups of runc are in this empty hierarchy.
    """
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in mounts if fields[2] in ("cgroup", "cgroup2")]


def _is_unified(hierarchy: Path) -> bool:
    return (hierarchy / "cgroup.controllers").exists()


def _delegate(hierarchy: Path) -> None:
    controllers = (hierarchy / "cgroup.controllers").read_text().split()
    (hierarchy / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
