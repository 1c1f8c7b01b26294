"""The decision about a SessionTemplate: which warm sessions to create, and which outdated ones to replace."""

from __future__ import annotations

from datetime import datetime

from tinsmith_operator.api.base import format_time
from tinsmith_operator.api.names import RETIRED_ANNOTATION, SESSION_KIND
from tinsmith_operator.common.actions import Action, Annotate, Create, Decision, Emit, EventType
from tinsmith_operator.template.situation import Member, ObservedTemplate, TemplateSituation, assess_template
from tinsmith_operator.template.status import write_template_status


def decide_template(observed: ObservedTemplate, now: datetime) -> Decision:
    """Return what to do about one template now. The function is pure.

    A deleted template leaves its sessions as they are.
    """
    if observed.template.is_being_deleted:
        return Decision(())
    situation = assess_template(observed, now)
    status = write_template_status(situation)
    if observed.template.is_paused:
        return Decision(status)
    return Decision((*status, *_create_missing(situation), *_retire_one(situation)))


def _create_missing(situation: TemplateSituation) -> tuple[Create, ...]:
    numbers = situation.observed.free_numbers[: situation.missing]
    return tuple(Create(situation.template.session(number)) for number in numbers)


def _retire_one(situation: TemplateSituation) -> tuple[Action, ...]:
    """Return the retirement of one outdated member, if no member leaves and no successor is on its way.

    So the template loses at most one warm session at a time. If a new spec does not start, the others stay.
    """
    if situation.missing or situation.coming or any(each.is_leaving for each in situation.members):
        return ()
    chosen = min(situation.outdated, key=lambda each: (each.is_ready, each.name), default=None)
    return _retire(chosen, situation.now) if chosen is not None else ()


def _retire(member: Member, now: datetime) -> tuple[Action, ...]:
    metadata = member.manifest["metadata"]
    why = f"The operator replaces {member.name}, because the template has changed."
    return (
        Annotate(
            SESSION_KIND,
            member.name,
            metadata["uid"],
            metadata["resourceVersion"],
            {RETIRED_ANNOTATION: format_time(now)},
        ),
        Emit(EventType.NORMAL, "Retired", why),
    )
