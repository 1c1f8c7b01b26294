"""What keeps the pods of a session."""

from __future__ import annotations

from tinsmith_operator.build.plan import WorkerPlan
from tinsmith_operator.build.ray_cluster import build_ray_cluster
from tinsmith_operator.build.stateful_set import build_stateful_set
from tinsmith_operator.installation import Installation
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.session import TrainingSession


def build_workload(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    """One pod is a StatefulSet's; several are a RayCluster's, which KubeRay keeps."""
    build = build_ray_cluster if session.spec.is_group else build_stateful_set
    return build(session, installation, plan)
