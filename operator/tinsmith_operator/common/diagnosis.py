"""How a finding is said; what can be wrong with sessions and pools alike: foreign objects, refusals, certificates."""

from __future__ import annotations

from collections.abc import Iterable
from unicodedata import category

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.conditions import Finding
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.common.observed import Surroundings

LONGEST_QUOTE = 600
NO_TEXT = {"Cc", "Cs", "Cn"}
"""Unicode's control characters, halves of pairs, and what is no character."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def found(reason: Reason, what: str) -> Finding:
    """One sentence: what is the matter here; and the cure that the reason knows."""
    cure = reason.cure.replace("`", "")
    return Finding(reason, f"{what.rstrip('.')}; {cure[0].lower()}{cure[1:]}" if cure else what)


def quoted(message: str) -> str:
    """Somebody else's words on one line, without their last full stop. The API server reads what is applied as YAML,
    which has no place for control characters."""
    line = " ".join(message.split()).rstrip(".")
    words = "".join(REPLACEMENT if category(letter) in NO_TEXT else letter for letter in line)
    return words if len(words) <= LONGEST_QUOTE else words[: LONGEST_QUOTE - 1] + "…"


REFUSALS = {
    "PersistentVolumeClaim": Reason.CLAIM_REFUSED,
    "StatefulSet": Reason.OVERRIDES_REFUSED,
    "RayCluster": Reason.OVERRIDES_REFUSED,
    "Deployment": Reason.OVERRIDES_REFUSED,
    "Job": Reason.OVERRIDES_REFUSED,
}
"""What is in the other kinds does not come from the spec."""


def name_conflict(owner: Owner, foreign_objects: Iterable[Manifest]) -> Finding | None:
    stranger = next(iter(foreign_objects), None)
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


def ca_problem(observed: Surroundings) -> Finding | None:
    problem = observed.ca_problem
    return found(Reason.CERTIFICATES_NOT_KEPT, quoted(problem)) if problem is not None else None


def missing_certificate(observed: Surroundings) -> Finding | None:
    return ca_problem(observed) if observed.certificate is None else None
