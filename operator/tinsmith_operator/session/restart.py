"""The differences between the running and the desired pods, and the rules about which differences require a restart.

A change of the session's own spec restarts the worker immediately. A change of the installation's settings for pods, or
of the default image (`upgrade.py`), waits for the session's turn. Another way to pull the same image requires no
restart, except for a pod that cannot pull its image.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import INPUTS_ANNOTATION, SPEC_ANNOTATION
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.worker import WorkerPlan, equivalent_hashes, inputs_hash, spec_hash
from tinsmith_operator.common.observed import Observed
from tinsmith_operator.common.ownership import OwnedObjects
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.installation import Installation


class Change(Enum):
    """The part of a pod's inputs that has changed since the start of the pod."""

    NONE = auto()
    PULL_ONLY = auto()
    """Only the way to pull the image has changed, and the containers stay the same."""
    SETTINGS = auto()
    """The installation's settings have changed."""
    SPEC = auto()
    """The session's spec has changed, or the changed part is unknown."""


def change_of(live: Manifest, session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Change:
    """Return what has changed. `live` is a pod, or the template of a pod."""
    annotations = live["metadata"].get("annotations") or {}
    inputs = annotations.get(INPUTS_ANNOTATION)
    if inputs == inputs_hash(session, installation, plan):
        return Change.NONE
    pull_secrets = (live.get("spec") or {}).get("imagePullSecrets") or ()
    if inputs in equivalent_hashes(session, installation, plan, pull_secrets):
        return Change.PULL_ONLY
    return Change.SETTINGS if annotations.get(SPEC_ANNOTATION) == spec_hash(session, plan) else Change.SPEC


def calls_for_restart(change: Change, pods: Iterable[Pod], *, has_turn: bool) -> bool:
    """Return whether the change requires a restart of these pods.

    If `has_turn` is true, the session may restart automatically now.
    """
    match change:
        case Change.NONE:
            return False
        case Change.PULL_ONLY:
            return any(pod.cannot_pull for pod in pods)
        case Change.SETTINGS:
            return has_turn
        case Change.SPEC:
            return True


@dataclass(frozen=True)
class RestartPlan:
    """The restarts that a session needs.

    - `must_restart`: the pod's inputs have changed, and the change requires a restart now.
    - `must_requeue`: the workload belongs to a queue, and its template has changed in a way that requires a restart
      now.
    - `settings_differ`: only the installation's settings have changed since the pod started.
    """

    must_restart: bool
    must_requeue: bool
    settings_differ: bool


def plan_restart(
    observed: Observed, owned: OwnedObjects, installation: Installation, worker: WorkerPlan | None, *, pulls: bool
) -> RestartPlan:
    """Return the plan.

    If `pulls` is true, a new image is being pulled. During a pull, other restarts wait, and happen together with the
    upgrade.
    """

    def change(live: Manifest | None) -> Change:
        return change_of(live, observed.session, installation, worker) if live and worker else Change.NONE

    def is_due(change: Change) -> bool:
        return not pulls and calls_for_restart(change, owned.pods, has_turn=observed.has_turn)

    runs = owned.pod is not None and worker is not None and worker.replicas > 0
    of_pod = change(owned.pod.manifest if owned.pod is not None and runs else None)
    is_held = owned.workload is not None and owned.workload.is_held
    of_template = change(owned.workload.template if owned.workload is not None and is_held else None)
    return RestartPlan(is_due(of_pod), is_due(of_template), of_pod is Change.SETTINGS)
