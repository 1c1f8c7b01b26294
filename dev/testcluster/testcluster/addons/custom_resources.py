"""The kinds of other projects that the chart uses, and the wait until objects of a new kind can be created."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from testcluster.errors import ClusterError
from testcluster.programs.builds import GO_MISSING

PINS = Path(__file__).parent / "definitions"
DEFINITIONS = {
    "sigs.k8s.io/gateway-api": ("config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",),
    "github.com/prometheus-operator/prometheus-operator": (
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
    ),
}
ESTABLISHED_SECONDS = 60.0


def definition_files() -> list[Path]:
    """Return the definitions, with the versions and hashes in `definitions/`.

    Missing definitions are downloaded.
    """
    if shutil.which("go") is None:
        raise ClusterError(GO_MISSING)
    command = ["go", "mod", "download", "-json"]
    finished = subprocess.run(command, cwd=PINS, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise ClusterError(f"the definitions of others' kinds cannot be had: {finished.stdout}{finished.stderr}")
    folders = {module["Path"]: Path(module["Dir"]) for module in _documents(finished.stdout)}
    return [folders[module] / file for module, files in DEFINITIONS.items() for file in files]


def install_other_kinds(kubectl: Callable[..., str]) -> None:
    """Install the kinds, and return when objects of these kinds can be created."""
    files = [f"--filename={file}" for file in definition_files()]
    kubectl("apply", "--server-side", "--force-conflicts", *files)
    wait_established(kubectl, *files)


def wait_established(kubectl: Callable[..., str], *crds: str) -> None:
    """Wait until the CRDs are established.

    `crds`: the names of the CRDs, or `--filename=…` with the path of the files.
    """
    ends_at = time.monotonic() + ESTABLISHED_SECONDS
    what = () if crds[0].startswith("--") else ("crd",)
    while True:
        found = json.loads(kubectl("get", *what, *crds, "--output=json"))
        waiting = [crd["metadata"]["name"] for crd in found.get("items", [found]) if not _is_established(crd)]
        if not waiting:
            return
        if time.monotonic() > ends_at:
            raise ClusterError(f"not established in {ESTABLISHED_SECONDS:.0f} s: {', '.join(waiting)}")
        time.sleep(0.2)


def wait_explained(kubectl: Callable[..., str], kind: str) -> None:
    """Wait until `kubectl` can validate an object of this kind.

    Discovery and OpenAPI contain a new CRD only after a delay.
    """
    ends_at = time.monotonic() + ESTABLISHED_SECONDS
    while True:
        try:
            kubectl("explain", kind)
        except ClusterError:
            if time.monotonic() > ends_at:
                raise
            time.sleep(0.2)
        else:
            return


def _documents(text: str) -> Iterator[dict[str, Any]]:
    """Return the JSON documents in a text that consists of several documents."""
    decoder, rest = json.JSONDecoder(), text.lstrip()
    while rest:
        document, end = decoder.raw_decode(rest)
        yield document
        rest = rest[end:].lstrip()


def _is_established(crd: dict[str, Any]) -> bool:
    conditions = crd.get("status", {}).get("conditions") or []
    return any((each["type"], each["status"]) == ("Established", "True") for each in conditions)
