"""The times at which a worker's certificate is renewed."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from support.operator.resources import session_manifest
from support.operator.session_world import World
from tinsmith_operator.common.actions import IssueCertificate, WriteStatus
from tinsmith_operator.common.observed import CertificateFacts
from tinsmith_operator.session.decision import decide


def settled_world() -> World:
    world = World(session_manifest())
    world.settle()
    return world


def issued(world: World, **observed: Any) -> list[IssueCertificate]:
    actions = decide(replace(world.observe(), **observed), world.installation, world.now).actions
    return [action for action in actions if isinstance(action, IssueCertificate)]


def facts(world: World) -> CertificateFacts:
    found = world.observe().certificate
    assert found is not None
    return found


@pytest.mark.parametrize(("days", "renewed"), [(0, False), (19, False), (20, True), (31, True)])
def test_a_certificate_is_renewed_ten_days_before_its_expiry(days: int, renewed: bool) -> None:
    world = settled_world()
    world.time_passes(timedelta(days=days))
    assert bool(issued(world)) is renewed


def test_an_unreadable_certificate_is_replaced() -> None:
    world = settled_world()
    (action,) = issued(world, certificate=None)
    secret = world.objects["Secret", "qwen-tls"]["metadata"]
    assert (action.uid, action.resource_version) == (secret["uid"], secret["resourceVersion"])


def test_a_renewal_does_not_restart_the_worker() -> None:
    world = settled_world()
    world.time_passes(timedelta(days=25))
    world.settle()
    assert issued(world) == []
    assert world.deleted == []


PROBLEM = "The Secret tin/tinsmith-ca holds no certificate authority."


def test_without_an_authority_nothing_is_issued_and_the_worker_runs_on() -> None:
    world = settled_world()
    world.time_passes(timedelta(days=25))
    observed = replace(world.observe(), authority_fingerprint=None, ca_problem=PROBLEM)
    actions = decide(observed, world.installation, world.now).actions
    (status,) = [action.status for action in actions if isinstance(action, WriteStatus)]
    said = {condition["type"]: (condition["status"], condition["reason"]) for condition in status["conditions"]}
    assert said["Ready"] == ("True", "WorkerReady")
    assert said["Degraded"] == ("True", "CertificatesNotKept")
    assert not issued(world, authority_fingerprint=None, ca_problem=PROBLEM)


def test_a_session_that_waits_for_its_first_certificate_says_what_is_wrong_with_the_authority() -> None:
    world = World(session_manifest())
    world.operate()
    world.binder_works()
    observed = replace(world.observe(), authority_fingerprint=None, ca_problem=PROBLEM)
    actions = decide(observed, world.installation, world.now).actions
    (status,) = [action.status for action in actions if isinstance(action, WriteStatus)]
    (stalled,) = [condition for condition in status["conditions"] if condition["type"] == "Stalled"]
    assert (stalled["status"], stalled["reason"]) == ("True", "CertificatesNotKept")
    assert "tin/tinsmith-ca" in stalled["message"]


def test_the_status_says_when_it_ends_and_moves_with_a_renewal() -> None:
    world = settled_world()
    first = world.observe().session.status.certificate_expiry_time
    assert first == facts(world).not_after
    world.time_passes(timedelta(days=20))
    world.settle()
    second = world.observe().session.status.certificate_expiry_time
    assert second == facts(world).not_after != first
