"""Whose a claim is that several name: one session's, for its journal, or those who read a model from it.

A journal's claim is one worker's, which writes to it. Who merely reads from a claim holds up no worker that has begun,
and no claim that is made for a session. Else who was made first has it: a later one stops nobody, on either side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.api.names import MANAGED_BY_LABEL, MANAGER, SESSION_LABEL
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.common.workloads import WORKLOAD_KINDS


def journal_holder(
    session: TrainingSession, claim: Manifest | None, users: Sequence[Manifest], pods: Iterable[Manifest]
) -> str | None:
    """The session whose worker has the claim, or that was made first, until it is gone, and its worker's pod too.

    users: the sessions that name it for their journal. pods: those with a journal on it.
    """
    first = min(users, key=lambda user: _precedence(user, claim), default=None)
    if first is not None and first["metadata"]["uid"] != session.uid:
        return str(first["metadata"]["name"])
    names = {user["metadata"]["name"] for user in users} | {session.name}
    left = (_session_of(pod) for pod in pods if not Pod(pod).has_ended and runs_worker(pod))
    return next((name for name in left if name not in names), None)


def runs_worker(pod: Manifest) -> bool:
    """Of a session, by its labels and by whose it is; also one whose workload was deleted from above it. It may run on
    where a node is silent. Whoever else mounts a claim is not ours to wait for, whatever its labels say."""
    metadata = pod["metadata"]
    labels = metadata.get("labels") or {}
    if labels.get("app.kubernetes.io/name") != TrainingSession.APPLICATION:
        return False
    owners = metadata.get("ownerReferences") or ()
    controller = next((owner for owner in owners if owner.get("controller")), None)
    return controller is None or (controller["kind"] in WORKLOAD_KINDS and controller["name"] == _session_of(pod))


def earlier_reader(session: TrainingSession, claim: Manifest | None, readers: Iterable[Manifest]) -> str | None:
    """Who reads a model from the claim that a session names for its journal, and may go on; in words.

    Nobody has anything to read on a claim that is made for the session, and nobody stops a worker that has begun.
    """
    has_begun = claim is not None and session.status.worker_id == claim["metadata"]["uid"]
    if session.spec.storage.existing_claim is None or has_begun:
        return None
    earlier = [each for each in readers if each["metadata"]["uid"] != session.uid and _age(each) < _age_of(session)]
    return _named(min(earlier, key=_age)) if earlier else None


def journal_of_another(reader: Owner, claim: Manifest | None, users: Iterable[Manifest]) -> str | None:
    """The session for whose journal the claim is that this session or pool would read a model from."""
    others = (user for user in users if user["metadata"]["uid"] != reader.uid)
    before = [user for user in others if _comes_first_of_all(user, claim) or _age(user) < _age_of(reader)]
    first = min(before, key=lambda user: _precedence(user, claim), default=None)
    return str(first["metadata"]["name"]) if first is not None else None


def _named(owner: Manifest) -> str:
    noun = "session" if owner["kind"] == TrainingSession.KIND else "pool"
    return f"{noun} {owner['metadata']['name']}"


def _comes_first_of_all(user: Manifest, claim: Manifest | None) -> bool:
    """Its worker has begun there, or the claim is made for it alone."""
    if _has_begun(user, claim):
        return True
    storage = (user.get("spec") or {}).get("storage") or {}
    return not storage.get("existingClaim") and (claim is None or _is_made_for(user, claim))


def _is_made_for(user: Manifest, claim: Manifest) -> bool:
    labels = claim["metadata"].get("labels") or {}
    return (labels.get(MANAGED_BY_LABEL), labels.get(SESSION_LABEL)) == (MANAGER, user["metadata"]["name"])


def _precedence(user: Manifest, claim: Manifest | None) -> tuple[bool, str, str]:
    """Times are in whole seconds: of two that were made within one, who has begun decides, and else the UIDs do."""
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
