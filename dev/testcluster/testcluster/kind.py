"""A cluster that kind makes on Docker or Podman, on request or if this machine cannot run the project's own cluster.

A cluster of kind has the storage class `standard`, and no Ingress controller. A test that needs more fails with a
message about the missing part. The node uses kind's own image, or the image that `make kind-node-image` has made. A
node with the image of `make kind-node-image` does not enforce NetworkPolicies.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from testcluster.commands import attempt, run
from testcluster.errors import ClusterError
from testcluster.kubernetes.containerd import Containerd
from testcluster.places import Places
from testcluster.programs.builds import KIND, KUBERNETES_VERSION

OWN_NODE_IMAGE = f"tinsmith.local/tinsmith/kind-node:v{KUBERNETES_VERSION}"
"""The image that `make kind-node-image` makes, for a machine that cannot pull kind's own image."""
# This image contains a network for one node, so kind must not install another one.
_ITS_SETTINGS = {
    "kind": "Cluster",
    "apiVersion": "kind.x-k8s.io/v1alpha4",
    "networking": {"disableDefaultCNI": True},
}
# kind's own variable. By default kind looks for docker first; this variable selects another engine.
_ENGINE_VARIABLE = "KIND_EXPERIMENTAL_PROVIDER"
_ENGINES = ("docker", "podman")
_CREATION_SECONDS = 600.0


def missing() -> str | None:
    """Return a sentence that says what this machine lacks for a kind cluster, or None if nothing is missing."""
    if _program() is None:
        return "kind is not installed: `go install sigs.k8s.io/kind@latest`, or see https://kind.sigs.k8s.io."
    return None if _engine() else _engine_is_missing()


def running_engine() -> str:
    """Return the container engine that runs the nodes. Raises ClusterError if no container engine answers."""
    if (engine := _engine()) is None:
        raise ClusterError(_engine_is_missing())
    return engine


def create(places: Places) -> None:
    """Create the cluster.

    The nodes use the project's node image if this image exists, otherwise kind's image, which kind may have to pull.

    Raises ClusterError if the pull or the start of the cluster fails.
    """
    engine = running_engine()
    places.directory.mkdir(parents=True, exist_ok=True)
    _marker(places).write_text(engine)
    if attempt(engine, "image", "inspect", OWN_NODE_IMAGE).returncode == 0:
        print(f"creating a cluster by kind on {engine} from {OWN_NODE_IMAGE} …", flush=True)
        settings = json.dumps(_ITS_SETTINGS)
        _kind(places, "create", "--wait=3m", f"--image={OWN_NODE_IMAGE}", "--config=-", stdin=settings)
        return
    print(f"creating a cluster by kind on {engine}: minutes when its image is not here yet …", flush=True)
    try:
        _kind(places, "create", "--wait=3m")
    except ClusterError as error:
        raise ClusterError(
            f"{error}\nWhere kind's image cannot be pulled, `make kind-node-image` makes one."
        ) from error


def was_here(places: Places) -> bool:
    """Return whether kind has ever tried to create this cluster."""
    return _marker(places).exists()


def delete(places: Places) -> None:
    """Delete the cluster. If no cluster with this name exists, do nothing."""
    _kind(places, "delete")


def node_name(places: Places) -> str:
    return f"{_name(places)}-control-plane"


def containerd(places: Places) -> Containerd:
    return Containerd((_marker(places).read_text(), "exec", "--interactive", node_name(places), "ctr"))


def _engine() -> str | None:
    """Return the engine that is configured for kind, or the first engine that answers."""
    named = os.environ.get(_ENGINE_VARIABLE)
    engines = (named,) if named else _ENGINES
    return next((one for one in engines if shutil.which(one) and attempt(one, "info").returncode == 0), None)


def _engine_is_missing() -> str:
    named = os.environ.get(_ENGINE_VARIABLE)
    programs = f"{named}, which {_ENGINE_VARIABLE} names" if named else "Docker or podman"
    return f"kind needs {programs}, and no `info` of it answers: start it, or install it."


def _program() -> str | None:
    """Return the command of kind: the installed program, or the program from the build of the project's node image."""
    return shutil.which("kind") or shutil.which("kind", path=KIND.folder())


def _kind(places: Places, verb: str, *options: str, stdin: str | None = None) -> None:
    """Run kind with the engine that created the cluster, even if a new cluster would use another engine."""
    engine = f"{_ENGINE_VARIABLE}={_marker(places).read_text()}"
    named = (f"--name={_name(places)}", f"--kubeconfig={places.kubeconfig}")
    if (program := _program()) is None:
        raise ClusterError(missing() or "")
    run("env", engine, program, verb, "cluster", *named, *options, stdin=stdin, seconds=_CREATION_SECONDS)


def _marker(places: Places) -> Path:
    """Return the file that contains the name of the engine."""
    return places.directory / "made-by-kind"


def _name(places: Places) -> str:
    return f"tinsmith-{places.name}"
