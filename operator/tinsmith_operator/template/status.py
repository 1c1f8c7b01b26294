"""The status of a template, with its conditions."""

from __future__ import annotations

from tinsmith_operator.api.conditions import Finding, move_conditions
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.status import SessionTemplateStatus
from tinsmith_operator.common.actions import Action
from tinsmith_operator.common.conditions import AS_WANTED, PAUSED, standard_conditions, status_changes
from tinsmith_operator.common.diagnosis import found, refusal
from tinsmith_operator.template.situation import TemplateSituation


def write_template_status(situation: TemplateSituation) -> tuple[Action, ...]:
    """Return the actions that write the status and the Events. If the status is up to date, return no action."""
    return status_changes(situation.template.status, build_template_status(situation))


def build_template_status(situation: TemplateSituation) -> SessionTemplateStatus:
    template, members = situation.template, situation.members
    readiness = _readiness(situation)
    progress = PAUSED if template.is_paused else _progress(situation, readiness)
    states = standard_conditions(readiness, progress, None)
    return SessionTemplateStatus(
        observed_generation=template.generation,
        conditions=move_conditions(
            template.status.conditions, states, generation=template.generation, now=situation.now
        ),
        sessions=len(members),
        summary=f"{len(members)}/{template.spec.max_sessions}",
        ready_warm=sum(each.is_ready for each in situation.warm),
        stale=sum(each.is_stale for each in members),
        warm_sessions=tuple(sorted(each.name for each in situation.warm)),
    )


def _readiness(situation: TemplateSituation) -> Finding:
    """Return whether the warm sessions are ready, or why they are not."""
    template, warm = situation.template, situation.warm
    refused = refusal(situation.observed.refusals) if situation.missing else None
    stalled = next((each for each in warm if each.is_stalled and not each.is_ready), None)
    if refused is not None:
        return refused
    if stalled is not None:
        message = stalled.ready.message if stalled.ready is not None else ""
        return found(Reason.MEMBER_STALLED, f"Session {stalled.name}: {message}")
    ready = sum(each.is_ready for each in warm)
    counts = f"{ready} of {template.spec.warm} warm sessions are ready"
    if ready == template.spec.warm:
        return found(Reason.TEMPLATE_READY, f"{counts}.")
    if situation.missing or len(warm) == template.spec.warm or any(each.is_leaving for each in situation.members):
        return found(Reason.WARMING, f"{counts}.")
    return found(Reason.ALL_SESSIONS_USED, f"{counts}, and {len(situation.members)} sessions exist.")


def _progress(situation: TemplateSituation, readiness: Finding) -> Finding:
    if readiness.reason is not Reason.TEMPLATE_READY:
        return readiness
    if situation.outdated or any(each.is_leaving and each.is_stale for each in situation.members):
        return found(Reason.REPLACING, f"{len(situation.outdated)} sessions have an outdated copy of the template.")
    return AS_WANTED
