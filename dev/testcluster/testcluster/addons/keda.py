"""KEDA in a test cluster: its kinds, its operator and its metrics API server, as pods of the namespace `keda`.

The manifests are those of KEDA's module, in the version of the programs. Only images and certificates differ.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from testcluster.addons.custom_resources import wait_established
from testcluster.errors import ClusterError
from testcluster.programs.archives import write_archive
from testcluster.programs.builds import KEDA, built

MODULE = "github.com/kedacore/keda/v2"
NAMESPACE = "keda"
SERVICES = ("keda-operator", "keda-metrics-apiserver")
READY_SECONDS = 180

Kubectl = Callable[..., str]
Manifest = dict[str, Any]
Files = Mapping[str, bytes]
"""The PEM files `tls.crt`, `tls.key` and `ca.crt`."""

_PROGRAMS = {"keda-operator": "operator", "keda-metrics-apiserver": "adapter"}
_MANIFESTS = (
    "general/namespace.yaml",
    "service_account/service_account.yaml",
    "rbac/role.yaml",
    "rbac/role_binding.yaml",
    "manager/service.yaml",
    "manager/manager.yaml",
    "metrics-server/role.yaml",
    "metrics-server/role_binding.yaml",
    "metrics-server/service.yaml",
    "metrics-server/deployment.yaml",
    "metrics-server/api_service.yaml",
)
_OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
# The schemas of the other kinds contain whole pod specs, and no test creates objects of these kinds.
_KEPT_SCHEMAS = ("ScaledObject", "TriggerAuthentication")


def dns_names() -> list[str]:
    """Return the names for the certificate that both programs of KEDA use."""
    return [f"{service}.{NAMESPACE}{suffix}" for service in SERVICES for suffix in (".svc", ".svc.cluster.local")]


def keda_images(scratch: Path) -> list[Path]:
    """Return archives of the images. The programs are built first, which takes minutes."""
    programs = built(KEDA)
    return [write_archive(scratch / f"{name}.tar", _image(name), programs / name) for name in _PROGRAMS.values()]


def install_keda(kubectl: Kubectl, certificate: Files) -> None:
    """Install KEDA with a certificate for `dns_names`, and return when KEDA serves metrics."""
    config = _module_folder() / "config"
    crds = [_lightened(_documents(file)[0]) for file in sorted((config / "crd" / "bases").glob("*.yaml"))]
    _apply(kubectl, crds)
    wait_established(kubectl, *(crd["metadata"]["name"] for crd in crds))
    namespace, *others = [each for file in _MANIFESTS for each in _documents(config / file)]
    _apply(kubectl, [namespace])
    _apply(kubectl, [_secret(certificate), *(_adapted(each, certificate) for each in others)])
    for name in _PROGRAMS:
        kubectl(f"--namespace={NAMESPACE}", "rollout", "status", f"deployment/{name}", f"--timeout={READY_SECONDS}s")
    kubectl("wait", "apiservice/v1beta1.external.metrics.k8s.io", "--for=condition=Available", "--timeout=120s")


def _image(program: str) -> str:
    return f"tinsmith.local/tinsmith/test-keda-{program}:1"


def _apply(kubectl: Kubectl, manifests: list[Manifest]) -> None:
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=listed)


def _documents(file: Path) -> list[Manifest]:
    return [each for each in yaml.load_all(file.read_bytes(), yaml.CSafeLoader) if each is not None]


def _lightened(crd: Manifest) -> Manifest:
    if crd["spec"]["names"]["kind"] in _KEPT_SCHEMAS:
        return crd
    versions = [{**version, "schema": {"openAPIV3Schema": _OPEN}} for version in crd["spec"]["versions"]]
    return {**crd, "spec": {**crd["spec"], "versions": versions}}


def _secret(certificate: Files) -> Manifest:
    encoded = {name: base64.b64encode(content).decode() for name, content in certificate.items()}
    metadata = {"name": "kedaorg-certs", "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": encoded}


def _adapted(manifest: Manifest, certificate: Files) -> Manifest:
    """Return the manifest with the built image and the given certificate, which KEDA does not rotate."""
    if manifest["kind"] == "APIService":
        bundle = base64.b64encode(certificate["ca.crt"]).decode()
        return {**manifest, "spec": {**manifest["spec"], "caBundle": bundle}}
    if manifest["kind"] != "Deployment":
        return manifest
    adapted: Manifest = json.loads(json.dumps(manifest))
    [container] = adapted["spec"]["template"]["spec"]["containers"]
    program = _PROGRAMS[adapted["metadata"]["name"]]
    container |= {"image": _image(program), "imagePullPolicy": "Never", "command": [f"/{program}"]}
    container["args"] = [each for each in container["args"] if not each.startswith("--enable-cert-rotation")]
    # Small requests, because one node of two processors runs everything.
    container["resources"] = {"requests": {"cpu": "10m", "memory": "64Mi"}}
    for probe in ("livenessProbe", "readinessProbe"):
        container[probe] |= {"initialDelaySeconds": 1, "periodSeconds": 2, "failureThreshold": 60}
    return adapted


def _module_folder() -> Path:
    """Return the folder of KEDA's module. A missing module is downloaded."""
    _go("mod", "download", MODULE)
    return Path(_go("list", "-m", "-f={{.Dir}}", MODULE))


def _go(*words: str) -> str:
    """Run the command `go`, and return the output. Raises ClusterError."""
    environment = os.environ | {"GOWORK": "off", "GOFLAGS": "-mod=mod"}
    finished = subprocess.run(
        ["go", *words], cwd=KEDA.source, env=environment, capture_output=True, text=True, check=False
    )
    if finished.returncode != 0:
        raise ClusterError(f"KEDA's manifests cannot be had: {finished.stderr}")
    return finished.stdout.strip()
