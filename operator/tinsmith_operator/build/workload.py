"""The workload of a session: a StatefulSet of one pod, or a RayCluster of several."""

from __future__ import annotations

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.metadata import child_metadata, sealed, selector_labels
from tinsmith_operator.build.ray_cluster import build_ray_cluster
from tinsmith_operator.build.worker import WorkerPlan, worker_template
from tinsmith_operator.installation import Installation


def build_workload(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    """One pod is a StatefulSet's; several are a RayCluster's, which KubeRay runs."""
    build = build_ray_cluster if session.spec.is_group else build_stateful_set
    return build(session, installation, plan)


def build_stateful_set(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    """OnDelete: when a worker restarts is decided by the operator, never by a change of the template."""
    return sealed(
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": child_metadata(session, session.workload_name),
            "spec": {
                "replicas": plan.replicas,
                "serviceName": session.workload_name,
                "selector": {"matchLabels": selector_labels(session)},
                "podManagementPolicy": "Parallel",
                "updateStrategy": {"type": "OnDelete"},
                "revisionHistoryLimit": 2,
                "template": worker_template(session, installation, plan),
            },
        }
    )
