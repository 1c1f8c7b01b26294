"""What a session's worker needs to be reached: its certificate, its address, and who may call it."""

from __future__ import annotations

from tinsmith_operator.build.policy import build_session_policy
from tinsmith_operator.build.service import build_service
from tinsmith_operator.decide.actions import Action
from tinsmith_operator.decide.certificate import keep_certificate
from tinsmith_operator.decide.situation import Situation
from tinsmith_operator.decide.upkeep import keep


def keep_access(situation: Situation) -> tuple[Action, ...]:
    session, observed, worker = situation.session, situation.observed, situation.worker
    return (
        *keep_certificate(observed, worker.worker_id if worker is not None else None, situation.now),
        *keep(session, observed.service, build_service(session)),
        *keep(session, observed.policy, build_session_policy(session, situation.installation)),
    )
