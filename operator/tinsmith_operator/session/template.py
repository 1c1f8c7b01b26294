"""Sessions from a template: the copy of the template, and the end of sessions that have an outdated copy."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from tinsmith_operator.api.conditions import move_conditions
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.session_template import SessionTemplate
from tinsmith_operator.api.status import TrainingSessionStatus
from tinsmith_operator.api.training_session import PendingSession, TrainingSession
from tinsmith_operator.common.actions import Action, Decision, Delete, WriteStatus
from tinsmith_operator.common.conditions import standard_conditions, status_changes
from tinsmith_operator.common.diagnosis import found
from tinsmith_operator.common.requests import retired_at
from tinsmith_operator.session.situation import Situation

RETIREMENT = timedelta(seconds=5)
"""The time from a retirement to the earliest report that counts. By then, each API server places no models on it."""


def decide_pending(session: PendingSession, template: SessionTemplate | None, now: datetime) -> Decision:
    """Return the write of the template's copy, or of the reason why there is no copy.

    From the next decision on, the session runs by the copy.
    """
    if session.is_being_deleted:
        return Decision(())
    if template is None or template.is_being_deleted:
        return Decision(status_changes(session.status, _without_template(session, now)))
    after = session.status.model_copy(update={"template": template.copy})
    return Decision((WriteStatus(after.to_manifest()),))


def _without_template(session: PendingSession, now: datetime) -> TrainingSessionStatus:
    name = f"{session.namespace}/{session.template_name}"
    missing = found(Reason.TEMPLATE_NOT_FOUND, f"SessionTemplate {name} (spec.templateRef) does not exist.")
    states = standard_conditions(missing, missing, None)
    moved = move_conditions(session.status.conditions, states, generation=session.generation, now=now)
    return session.status.model_copy(update={"conditions": moved, "observed_generation": session.generation})


def exempted(session: TrainingSession, template: SessionTemplate | None) -> TrainingSession:
    """Return the session. A warm session of the template has no idle policy."""
    if template is None or session.name not in template.status.warm_sessions:
        return session
    return replace(session, spec=session.spec.model_copy(update={"idle": None}))


def delete_retired(situation: Situation) -> tuple[Action, ...]:
    """Return the deletion of a retired session, if it certainly holds no model."""
    session, since = situation.session, retired_at(situation.session)
    if since is None or situation.now < since + RETIREMENT or not _holds_nothing(situation, since + RETIREMENT):
        return ()
    why = "it has an outdated copy of its template, and holds no models"
    return (Delete(session.KIND, session.name, session.uid, why, resource_version=session.resource_version),)


def _holds_nothing(situation: Situation, since: datetime) -> bool:
    """Return whether the session holds no model, by a report after `since`.

    A session that was never ready holds none. A session that stopped holds as many as before.
    """
    report, adapters = situation.report, situation.adapters
    if adapters is not None and adapters.used > 0:
        return False
    if situation.session.status.first_ready_time is None or situation.stop_reason is not None:
        return True
    return report is not None and report.received_at >= since


def retirement_moments(session: TrainingSession) -> tuple[datetime, ...]:
    """Return the time from which a retired session may be deleted. After that, each report causes a reconcile."""
    since = retired_at(session)
    return (since + RETIREMENT,) if since is not None else ()
