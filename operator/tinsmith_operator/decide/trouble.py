"""What can be the matter with a session as with a pool: other people's objects, refusals, certificates."""

from __future__ import annotations

from collections.abc import Iterable

from tinsmith_operator.decide.observed import Surroundings
from tinsmith_operator.decide.wording import found, quoted
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.conditions import Finding
from tinsmith_operator.model.owner import Owner
from tinsmith_operator.model.reasons import Reason

REFUSALS = {
    "PersistentVolumeClaim": Reason.CLAIM_REFUSED,
    "StatefulSet": Reason.OVERRIDES_REFUSED,
    "RayCluster": Reason.OVERRIDES_REFUSED,
    "Deployment": Reason.OVERRIDES_REFUSED,
    "Job": Reason.OVERRIDES_REFUSED,
}
"""What is in the other kinds does not come from the spec."""


def name_conflict(owner: Owner, strangers: Iterable[Manifest]) -> Finding | None:
    stranger = next(iter(strangers), None)
    if stranger is None:
        return None
    name = f"{stranger['kind']} {stranger['metadata']['name']}"
    return found(Reason.NAME_CONFLICT, f"{name} is not this {owner.NOUN}'s, and is left alone.")


def refusal(observed: Surroundings) -> Finding | None:
    """What the API server has against an object of ours."""
    for kind, message in observed.refusals.items():
        reason = REFUSALS.get(kind, Reason.OBJECT_REFUSED)
        return found(reason, f"The API server refused the {kind}: {quoted(message)}.")
    return None


def trust_problem(observed: Surroundings) -> Finding | None:
    problem = observed.trust_problem
    return found(Reason.CERTIFICATES_NOT_KEPT, quoted(problem)) if problem is not None else None


def missing_certificate(observed: Surroundings) -> Finding | None:
    return trust_problem(observed) if observed.certificate is None else None
