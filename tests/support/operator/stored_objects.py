"""Objects that API servers keep of earlier revisions; tests/fixtures/stored says where they come from."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from support.operator.model_cluster import AUTHORITY, AUTHORITY_END, LEAF_LIFE
from support.operator.session_world import World
from tinsmith_operator.api.names import worker_dns_name
from tinsmith_operator.common.observed import CertificateFacts

Manifest = dict[str, Any]

STORED_IMAGE = "docker.io/tinsmith/trainer:0.1.0"
"""The default image of that revision, which is part of the hashes that it stored."""
STORED = Path(__file__).parents[2] / "fixtures" / "stored" / "v1alpha1"


@dataclass(frozen=True)
class Stored:
    """One session, and the objects that the operator of its revision made of it."""

    name: str
    session: Manifest
    children: tuple[Manifest, ...]

    def child(self, kind: str) -> Manifest | None:
        return next((child for child in self.children if child["kind"] == kind), None)

    @property
    def read_at(self) -> datetime:
        """A while after the last thing that happened to it."""
        conditions = self.session["status"]["conditions"]
        times = (datetime.fromisoformat(condition["lastTransitionTime"]) for condition in conditions)
        return max(times) + timedelta(minutes=5)

    def world(self) -> World:
        """Return a cluster that has all these objects, and a certificate that has not expired."""
        world = World(self.session)
        world.now = self.read_at
        for child in self.children:
            live = world.objects[child["kind"], child["metadata"]["name"]] = copy.deepcopy(child)
            # Which a claim has not, and a world counts for every object.
            live["metadata"].setdefault("generation", 1)
        claim, secret = self.child("PersistentVolumeClaim"), self.child("Secret")
        if claim is not None and secret is not None:
            facts = CertificateFacts(
                world.now,
                world.now + LEAF_LIFE,
                (worker_dns_name(claim["metadata"]["uid"]),),
                AUTHORITY,
                authority_not_after=AUTHORITY_END,
            )
            world.certificates[secret["metadata"]["uid"]] = facts
        return world


def stored(revision: int) -> dict[str, Stored]:
    """Shape to what is stored of it."""
    return {file.stem: _read(file) for file in sorted((STORED / str(revision)).glob("*.yaml"))}


def _read(file: Path) -> Stored:
    session, *children = yaml.safe_load_all(file.read_text())
    return Stored(file.stem, session, tuple(children))
