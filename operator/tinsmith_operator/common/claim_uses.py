"""The rules for a claim that several sessions or pools name, for a journal or for reading a model.

Only one worker writes to the claim of a journal. A session or pool that reads a model from the claim stops neither a
running worker nor a session for which the claim was made. In all other cases the older session or pool may use the
claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.api.names import MANAGED_BY_LABEL, MANAGER, SESSION_LABEL
from tinsmith_operator.api.owner import Owner, effective_spec
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.common.workloads import WORKLOAD_KINDS


def journal_holder(
    session: TrainingSession, claim: Manifest | None, users: Sequence[Manifest], pods: Iterable[Manifest]
) -> str | None:
    """Return the other session that uses the claim, or None.

    A session uses its claim until both the session and the pod of its worker are gone.

    - `users`: the sessions that name the claim for their journal.
    - `pods`: the pods that have their journal on the claim.
    """
    first = min(users, key=lambda user: _precedence(user, claim), default=None)
    if first is not None and first["metadata"]["uid"] != session.uid:
        return str(first["metadata"]["name"])
    names = {user["metadata"]["name"] for user in users} | {session.name}
    left = (_session_of(pod) for pod in pods if not Pod(pod).has_ended and runs_worker(pod))
    return next((name for name in left if name not in names), None)


def runs_worker(pod: Manifest) -> bool:
    """Return whether the pod runs a session's worker, according to the pod's labels and controller.

    A worker's pod without a controller counts, too: after its workload was deleted, the pod may still run on an
    unreachable node.
    """
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    if labels.get("app.kubernetes.io/name") != TrainingSession.APPLICATION:
        return False
    owners = metadata.get("ownerReferences") or ()
    controller = next((owner for owner in owners if owner.get("controller")), None)
    return controller is None or (controller["kind"] in WORKLOAD_KINDS and controller["name"] == _session_of(pod))


def earlier_reader(session: TrainingSession, claim: Manifest | None, readers: Iterable[Manifest]) -> str | None:
    """Return the kind and name of an older session or pool that reads a model from this session's journal claim.

    A claim that was made for the session holds no model. If the session's worker has started, an older reader of the
    claim does not count.
    """
    has_begun = claim is not None and session.status.worker_id == claim["metadata"]["uid"]
    if session.spec.storage.existing_claim is None or has_begun:
        return None
    earlier = [each for each in readers if each["metadata"]["uid"] != session.uid and _age(each) < _age_of(session)]
    return _named(min(earlier, key=_age)) if earlier else None


def journal_of_another(reader: Owner, claim: Manifest | None, users: Iterable[Manifest]) -> str | None:
    """Return the name of the session whose journal is on the claim that the reader names for its model, or None."""
    others = (user for user in users if user["metadata"]["uid"] != reader.uid)
    before = [user for user in others if _comes_first_of_all(user, claim) or _age(user) < _age_of(reader)]
    first = min(before, key=lambda user: _precedence(user, claim), default=None)
    return str(first["metadata"]["name"]) if first is not None else None


def _named(owner: Manifest) -> str:
    noun = "session" if owner["kind"] == TrainingSession.KIND else "pool"
    return f"{noun} {owner['metadata']['name']}"


def _comes_first_of_all(user: Manifest, claim: Manifest | None) -> bool:
    """Return whether the session's worker has started on the claim, or the claim was made for this session."""
    if _has_begun(user, claim):
        return True
    storage = effective_spec(user).get("storage") or {}
    return not storage.get("existingClaim") and (claim is None or _is_made_for(user, claim))


def _is_made_for(user: Manifest, claim: Manifest) -> bool:
    labels = claim["metadata"].get("labels") or {}
    return (labels.get(MANAGED_BY_LABEL), labels.get(SESSION_LABEL)) == (MANAGER, user["metadata"]["name"])


def _precedence(user: Manifest, claim: Manifest | None) -> tuple[bool, str, str]:
    """Return a sort key for sessions. Sessions with a started worker come first, then the oldest sessions.

    The creation times are in whole seconds, so the UIDs decide between sessions of the same second.
    """
    return not _has_begun(user, claim), *_age(user)


def _has_begun(user: Manifest, claim: Manifest | None) -> bool:
    return claim is not None and (user.get("status") or {}).get("workerId") == claim["metadata"]["uid"]


def _age(owner: Manifest) -> tuple[str, str]:
    return str(owner["metadata"].get("creationTimestamp")), str(owner["metadata"]["uid"])


def _age_of(owner: Owner) -> tuple[str, str]:
    made_at = format_time(owner.creation_time) if owner.creation_time is not None else None
    return str(made_at), owner.uid


def _session_of(pod: Manifest) -> str:
    return str((pod["metadata"].get("labels") or {}).get(SESSION_LABEL))
