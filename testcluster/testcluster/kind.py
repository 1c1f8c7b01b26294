"""A cluster by kind, where it and a running docker are there, and a cluster of our own is not to be had.

It has what kind brings: one storage class, `standard`, and no Ingress controller. Tests that need more fail and say so.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from testcluster.commands import attempt, run
from testcluster.kubernetes.containerd import Containerd
from testcluster.places import Places

_CREATION_SECONDS = 600.0


def usable() -> bool:
    return bool(shutil.which("kind") and shutil.which("docker")) and attempt("docker", "info").returncode == 0


def create(places: Places) -> None:
    """Pulls kind's node image where it is not there yet; raises ClusterError when that or the start fails."""
    print("creating a cluster by kind: minutes when its image is not here yet …", flush=True)
    places.directory.mkdir(parents=True, exist_ok=True)
    _marker(places).touch()
    command = ["kind", "create", "cluster", f"--name={_name(places)}", f"--kubeconfig={places.kubeconfig}", "--wait=3m"]
    run(*command, seconds=_CREATION_SECONDS)


def was_here(places: Places) -> bool:
    """Whether kind was ever asked to make this cluster."""
    return _marker(places).exists()


def delete(places: Places) -> None:
    """Fine where there is none of that name."""
    run("kind", "delete", "cluster", f"--name={_name(places)}", f"--kubeconfig={places.kubeconfig}")


def node_name(places: Places) -> str:
    return f"{_name(places)}-control-plane"


def containerd(places: Places) -> Containerd:
    return Containerd(("docker", "exec", "--interactive", node_name(places), "ctr"))


def _marker(places: Places) -> Path:
    return places.directory / "made-by-kind"


def _name(places: Places) -> str:
    return f"tinsmith-{places.name}"
