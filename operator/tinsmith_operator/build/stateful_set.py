"""The StatefulSet of one that keeps the worker's pod."""

from __future__ import annotations

from tinsmith_operator.build.metadata import child_metadata, sealed, selector_labels
from tinsmith_operator.build.plan import WorkerPlan
from tinsmith_operator.build.worker import worker_template
from tinsmith_operator.installation import Installation
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.session import TrainingSession


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
