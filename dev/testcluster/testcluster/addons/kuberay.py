"""KubeRay in a test cluster: the CRDs, and the KubeRay operator as a process on this machine.

The CRDs and the operator have the same version.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from testcluster.addons.custom_resources import wait_established
from testcluster.errors import ClusterError
from testcluster.programs.builds import KUBERAY, built

MODULE = "github.com/ray-project/kuberay/ray-operator"
STOP_SECONDS = 60.0

Kubectl = Callable[..., str]
Manifest = dict[str, Any]

OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def definitions() -> list[Manifest]:
    """Return the CRDs of KubeRay from the module cache of Go, in the stored API version.

    Only the kind RayCluster keeps the whole schema.

    KubeRay does not start unless all its kinds exist. The schemas of the other kinds contain several whole pod specs,
    which would take an API server many seconds. No test creates objects of the other kinds.
    """
    return [_lightened(yaml.load(file.read_bytes(), yaml.CSafeLoader)) for file in _files()]


def install_kuberay_kinds(kubectl: Kubectl) -> None:
    """Install the kinds of KubeRay, and return when objects of these kinds can be created."""
    crds = definitions()
    kubectl(
        "apply", "--server-side", "--filename=-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": crds})
    )
    wait_established(kubectl, *(crd["metadata"]["name"] for crd in crds))


def _lightened(crd: Manifest) -> Manifest:
    [version] = [each for each in crd["spec"]["versions"] if each["storage"]]
    if crd["spec"]["names"]["kind"] != "RayCluster":
        version = {**version, "schema": {"openAPIV3Schema": OPEN}}
    return {**crd, "spec": {**crd["spec"], "versions": [version]}}


def _files() -> list[Path]:
    """Return the files of the module. A missing module is downloaded."""
    _go("mod", "download", MODULE)
    directory = Path(_go("list", "-m", "-f={{.Dir}}", MODULE))
    return sorted((directory / "config" / "crd" / "bases").glob("ray.io_*.yaml"))


def _go(*words: str) -> str:
    """Run the command `go`, and return the output. Raises ClusterError."""
    environment = os.environ | {"GOWORK": "off", "GOFLAGS": "-mod=mod"}
    finished = subprocess.run(
        ["go", *words], cwd=KUBERAY.source, env=environment, capture_output=True, text=True, check=False
    )
    if finished.returncode != 0:
        raise ClusterError(f"KubeRay's definitions cannot be had: {finished.stderr}")
    return finished.stdout.strip()


@contextmanager
def kuberay_operator(kubeconfig: Path, namespace: str, log: Path) -> Iterator[None]:
    """Run the operator for one namespace while the context is open. The CRDs of KubeRay must be installed."""
    options = ["--metrics-addr=0", "--health-probe-bind-address=0", "--enable-leader-election=false"]
    command = [str(built(KUBERAY) / "ray-operator"), f"--watch-namespace={namespace}", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | {"KUBECONFIG": str(kubeconfig)}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            finally:
                process.kill()
                process.wait()
