"""Kinds of others that the chart makes objects of: their definitions, out of the Go modules that hold them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.cluster.builds import GO_MISSING
from support.cluster.errors import ClusterError
from support.cluster.established import wait_established

PINS = Path(__file__).parent / "definitions"
DEFINITIONS = {
    "sigs.k8s.io/gateway-api": ("config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",),
    "github.com/prometheus-operator/prometheus-operator": (
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
    ),
}


def definition_files() -> list[Path]:
    """Downloads what is not in Go's module cache yet, of the versions and hashes of `definitions/`."""
    if shutil.which("go") is None:
        raise ClusterError(GO_MISSING)
    command = ["go", "mod", "download", "-json"]
    finished = subprocess.run(command, cwd=PINS, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise ClusterError(f"the definitions of others' kinds cannot be had: {finished.stdout}{finished.stderr}")
    folders = {module["Path"]: Path(module["Dir"]) for module in _documents(finished.stdout)}
    return [folders[module] / file for module, files in DEFINITIONS.items() for file in files]


def install_other_kinds(kubectl: Callable[..., str]) -> None:
    """Returns when objects of these kinds can be made."""
    files = [f"--filename={file}" for file in definition_files()]
    kubectl("apply", "--server-side", "--force-conflicts", *files)
    wait_established(kubectl, *files)


def _documents(text: str) -> Iterator[dict[str, Any]]:
    """JSON documents that follow one another."""
    decoder, rest = json.JSONDecoder(), text.lstrip()
    while rest:
        document, end = decoder.raw_decode(rest)
        yield document
        rest = rest[end:].lstrip()
