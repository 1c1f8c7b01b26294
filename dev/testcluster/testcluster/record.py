"""The record of a cluster that is up."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from testcluster.places import Places, clusters_directory
from testcluster.processes import ProcessTable

Tier = Literal["api", "node"]
Maker = Literal["ourselves", "kind"]


@dataclass(frozen=True)
class Record:
    name: str
    tier: Tier
    maker: Maker
    kubeconfig: str
    kubectl: str
    nodes: tuple[str, ...] = ()
    ingress_address: str | None = None


def write_record(record: Record) -> None:
    """Write the record atomically."""
    file = Places(record.name).record
    scratch = file.with_suffix(".new")
    scratch.write_text(json.dumps(asdict(record), indent=2) + "\n")
    scratch.rename(file)


def read_record(places: Places) -> Record | None:
    """Return the record.

    Return None if the cluster is not up, if a process of the cluster has ended, or if another version of this package
    wrote the record.
    """
    try:
        fields = json.loads(places.record.read_text())
        record = Record(**{**fields, "nodes": tuple(fields["nodes"])})
    except (FileNotFoundError, TypeError):
        return None
    return None if dead_processes(places) else record


def dead_processes(places: Places) -> list[str]:
    table = ProcessTable(places)
    return [name for name in table.names() if not table.is_alive(name)]


def every_place() -> list[Places]:
    """Return the folders of all clusters of this user, including stopped clusters."""
    folders = [entry for entry in clusters_directory().glob("*") if entry.is_dir()]
    return [Places(folder.name) for folder in sorted(folders)]
