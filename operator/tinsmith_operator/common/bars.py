"""Why a session or pool must have no pods at all, whatever else is the matter with it.

What runs is stopped, with a snapshot, and its volume keeps everything. It goes on by itself when the bar is gone.
"""

from __future__ import annotations

from collections.abc import Callable

from tinsmith_operator.api.conditions import Finding
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.references import Named, Reference, references_of
from tinsmith_operator.common.diagnosis import found
from tinsmith_operator.common.observed import Surroundings
from tinsmith_operator.common.ownership import is_ours
from tinsmith_operator.installation import Installation

CLAIM = "PersistentVolumeClaim"


def bar_of(observed: Surroundings, installation: Installation, image: str | None = None) -> Finding | None:
    """image: that would run though the spec does not name it."""
    looks: tuple[Callable[[], Finding | None], ...] = (
        lambda: _objection(observed, installation, image),
        lambda: _journal_for_a_model(observed),
    )
    return next((finding for look in looks if (finding := look()) is not None), None)


def _objection(observed: Surroundings, installation: Installation, image: str | None) -> Finding | None:
    """The image that the volume is pinned to comes last: whoever names another one in the spec gets that."""
    pinned = [Reference("its volume's", Named.IMAGE, image)] if image is not None else []
    objection = installation.policy.objection([*references_of(observed.owner), *pinned])
    return found(objection.reason, objection.words) if objection is not None else None


def _journal_for_a_model(observed: Surroundings) -> Finding | None:
    read = observed.read_journal
    if read is None:
        return None
    return found(
        Reason.CLAIM_IS_JOURNAL,
        f"{CLAIM} {read.claim} ({read.field}) is the journal of session {read.session}, and nobody else's to mount.",
    )


def certificate_is_anothers(observed: Surroundings) -> bool:
    """A pod would mount it, key and all. Which is said as a conflict of names; what runs already has its own."""
    live = observed.certificate_secret
    return live is not None and not is_ours(observed.owner, live)
