"""How what runs differs from what is wanted now, and who said so: whether that is a reason to restart it.

What its user said is one at once. What only the installation says, its settings for pods, waits for a turn, as another
default image does (`upgrade.py`). How a node gets the image is no reason at all, but for a pod that cannot get it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import ASKED_ANNOTATION, INPUTS_ANNOTATION
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.worker import WorkerPlan, asked_hash, hashes_of_the_same, inputs_hash
from tinsmith_operator.common.diagnosis import cannot_fetch
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.installation import Installation


class Difference(Enum):
    NONE = auto()
    FETCHING = auto()  # the same runs, and a node would get its image otherwise
    SETTINGS = auto()  # the installation says something else
    ASKED = auto()  # the session's user does, or nobody can tell who


def difference(live: Manifest, session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Difference:
    """live: a pod, or the template of one."""
    said = live["metadata"].get("annotations") or {}
    inputs = said.get(INPUTS_ANNOTATION)
    if inputs == inputs_hash(session, installation, plan):
        return Difference.NONE
    pull_secrets = (live.get("spec") or {}).get("imagePullSecrets") or ()
    if inputs in hashes_of_the_same(session, installation, plan, pull_secrets):
        return Difference.FETCHING
    # A pod of an earlier operator does not say what of it was asked for.
    return Difference.SETTINGS if said.get(ASKED_ANNOTATION) == asked_hash(session, plan) else Difference.ASKED


def is_reason_to_restart(found: Difference, pods: Iterable[Pod], *, has_turn: bool) -> bool:
    """pods: those that run so."""
    match found:
        case Difference.NONE:
            return False
        case Difference.FETCHING:
            return any(cannot_fetch(pod) for pod in pods)
        case Difference.SETTINGS:
            return has_turn
        case Difference.ASKED:
            return True
