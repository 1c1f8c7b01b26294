"""How far a pool's Deployment has come, by its own status."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_operator.model.base import Manifest


@dataclass(frozen=True)
class Rollout:
    """replicas, ready, updated: pods that are not on their way out.
    is_known: whether its controller has seen this version of it.
    refused: what the API server says when a pod is to be made.
    """

    replicas: int = 0
    ready: int = 0
    updated: int = 0
    is_known: bool = False
    refused: str | None = None

    def is_done(self, wanted: int) -> bool:
        return self.is_known and self.replicas == self.ready == self.updated == wanted


def read_rollout(deployment: Manifest | None) -> Rollout:
    if deployment is None:
        return Rollout()
    status = deployment.get("status") or {}
    failures = (each for each in status.get("conditions") or () if each["type"] == "ReplicaFailure")
    return Rollout(
        replicas=status.get("replicas", 0),
        ready=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        is_known=status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0),
        refused=next((each.get("message", "") for each in failures if each["status"] == "True"), None),
    )
