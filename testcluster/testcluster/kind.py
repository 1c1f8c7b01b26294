"""A cluster by kind, on Docker or podman: asked for by name, or where a cluster of our own is not to be had.

It has what kind brings: one storage class, `standard`, and no Ingress controller. Tests that need more fail and say so.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from testcluster.commands import attempt, run
from testcluster.errors import ClusterError
from testcluster.kubernetes.containerd import Containerd
from testcluster.places import Places

# Kind's own: it looks for docker first, and takes another engine by this variable.
_ENGINE_VARIABLE = "KIND_EXPERIMENTAL_PROVIDER"
_ENGINES = ("docker", "podman")
_CREATION_SECONDS = 600.0


def missing() -> str | None:
    """One sentence on what this machine lacks for a cluster by kind; None where it lacks nothing."""
    if shutil.which("kind") is None:
        return "kind is not installed: `go install sigs.k8s.io/kind@latest`, or see https://kind.sigs.k8s.io."
    if _engine() is None:
        named = os.environ.get(_ENGINE_VARIABLE)
        programs = f"{named}, which {_ENGINE_VARIABLE} names" if named else "Docker or podman"
        return f"kind needs {programs}, and no `info` of it answers: start it, or install it."
    return None


def create(places: Places) -> None:
    """Pulls kind's node image where it is not there yet; raises ClusterError when that or the start fails."""
    if (engine := _engine()) is None:
        raise ClusterError(missing() or "The container engine has stopped answering.")
    print(f"creating a cluster by kind on {engine}: minutes when its image is not here yet …", flush=True)
    places.directory.mkdir(parents=True, exist_ok=True)
    _marker(places).write_text(engine)
    _kind(places, "create", "--wait=3m")


def was_here(places: Places) -> bool:
    """Whether kind was ever asked to make this cluster."""
    return _marker(places).exists()


def delete(places: Places) -> None:
    """Fine where there is none of that name."""
    _kind(places, "delete")


def node_name(places: Places) -> str:
    return f"{_name(places)}-control-plane"


def containerd(places: Places) -> Containerd:
    return Containerd((_marker(places).read_text(), "exec", "--interactive", node_name(places), "ctr"))


def _engine() -> str | None:
    """The one that kind is told to take, or else the first that answers."""
    named = os.environ.get(_ENGINE_VARIABLE)
    engines = (named,) if named else _ENGINES
    return next((one for one in engines if shutil.which(one) and attempt(one, "info").returncode == 0), None)


def _kind(places: Places, verb: str, *options: str) -> None:
    """On the engine that the cluster was begun with, whichever answers today."""
    engine = f"{_ENGINE_VARIABLE}={_marker(places).read_text()}"
    named = (f"--name={_name(places)}", f"--kubeconfig={places.kubeconfig}")
    run("env", engine, "kind", verb, "cluster", *named, *options, seconds=_CREATION_SECONDS)


def _marker(places: Places) -> Path:
    """Holds the engine's name."""
    return places.directory / "made-by-kind"


def _name(places: Places) -> str:
    return f"tinsmith-{places.name}"
