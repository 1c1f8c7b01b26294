"""decide: the one entry of this package, and its table of contents."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from tinsmith_operator.decide.access import keep_access
from tinsmith_operator.decide.actions import Action, Decision
from tinsmith_operator.decide.certificate import renewal_time
from tinsmith_operator.decide.claim import grow_claim, keep_claim
from tinsmith_operator.decide.conditions import is_ready, wanted_conditions
from tinsmith_operator.decide.conversion import keep_conversion
from tinsmith_operator.decide.deletion import decide_deletion, keep_finalizer
from tinsmith_operator.decide.group import stop_left_behind
from tinsmith_operator.decide.observed import Observed
from tinsmith_operator.decide.situation import Situation, assess
from tinsmith_operator.decide.status import adapter_usage, write_status
from tinsmith_operator.decide.timing import LOOK_FOR_WARNINGS, moments_of, seconds_until_first
from tinsmith_operator.decide.upkeep import still_refused
from tinsmith_operator.decide.workload import keep_workload, replace_pod, stop_the_unadopted
from tinsmith_operator.installation import Installation


def decide(observed: Observed, installation: Installation, now: datetime) -> Decision:
    """What is to be done about one session now. Pure: the same input, the same answer; no clock and no chance in it.

    Doing what it says, and deciding again from what is there then, ends where nothing is to be done.
    """
    situation = assess(observed, installation, now)
    if observed.session.is_being_deleted:
        return decide_deletion(situation)
    if finalizer := keep_finalizer(situation):
        return Decision(finalizer)
    children = keep_children(situation)
    refusals = still_refused(observed.refusals, children)
    situation = replace(situation, observed=replace(observed, refusals=refusals))
    conditions = wanted_conditions(situation, adapter_usage(situation), acts=bool(children))
    # The status comes first: what the API server refuses below must not keep it from being said.
    return Decision((*write_status(situation, conditions), *children), seconds_until_next_look(situation))


def keep_children(situation: Situation) -> tuple[Action, ...]:
    """In the order in which they need each other: the claim names the worker, the pod mounts the certificate, and its
    model is converted before."""
    return (
        *keep_claim(situation),
        *keep_access(situation),
        *keep_conversion(situation),
        *keep_workload(situation),
        *(replace_pod(situation) or stop_left_behind(situation)),
        *stop_the_unadopted(situation),
        *grow_claim(situation),
    )


def seconds_until_next_look(situation: Situation) -> float | None:
    observed, pod, now = situation.observed, situation.pod, situation.now
    moments = [renewal_time(observed.certificate)] if observed.certificate is not None else []
    for each in (*([pod] if pod is not None else []), *situation.members, *situation.converters):
        moments += moments_of(each)
    if not is_ready(situation) and not situation.session.spec.suspend:
        moments.append(now + LOOK_FOR_WARNINGS)
    return seconds_until_first(moments, now)
