"""Suspend, resume, snapshot and restart: the change, its completion, and its failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.kubernetes import families
from tinsmith.cluster import requests
from tinsmith.cluster.families import Family, Kind
from tinsmith.cluster.kubectl import ClusterUnreachable, Misused, NotFound, RequestFailed
from tinsmith.cluster.requests import Request, wait_for
from tinsmith_operator.api.reasons import Progress, Reason
from tinsmith_operator.common.conditions import standard_conditions
from tinsmith_operator.common.diagnosis import found

Manifest = dict[str, Any]
SUSPENDED = families.unready("Suspended", "The worker is stopped.")
AT = families.NOW


def session(conditions: list[Manifest] | None = None, *pods: Manifest, **status: Any) -> Family:
    return Family(Kind.SESSION, families.session(conditions=conditions, **status), pods=pods)


def pool(conditions: list[Manifest] | None = None, *pods: Manifest, replicas: int = 2) -> Family:
    return Family(Kind.POOL, families.pool(conditions=conditions, replicas=replicas), pods=pods)


def pod(uid: str, *, is_ready: bool = True) -> Manifest:
    return families.pod("qwen-0", of=families.session(), uid=uid, is_ready=is_ready)


def test_suspending_is_done_when_the_status_says_so_of_this_spec() -> None:
    request = requests.suspend(session(families.ready()))
    assert request.patch == {"spec": {"suspend": True}}
    assert request.outcome(session(families.ready())) is None
    done = session(SUSPENDED)
    assert "is suspended" in (request.outcome(done) or "")
    done.owner["metadata"]["generation"] = 2
    assert request.outcome(done) is None


def test_resuming_is_done_when_it_is_ready_again() -> None:
    request = requests.resume(session(SUSPENDED))
    assert request.patch == {"spec": {"suspend": False}}
    assert request.outcome(session(SUSPENDED)) is None
    assert "is ready" in (request.outcome(session(families.ready())) or "")


@pytest.mark.parametrize("family", [session, pool])
def test_a_wake_is_done_when_it_is_ready_again(family: Callable[[list[Manifest]], Family]) -> None:
    idle = family(families.unready("Idle", "No client has used it."))
    request = requests.wake(idle, AT)
    assert request.patch == {"metadata": {"annotations": {"tinsmith.dev/wake-requested-at": "2026-01-02T03:04:05Z"}}}
    assert request.outcome(idle) is None
    assert "is ready" in (request.outcome(family(families.ready())) or "")


def test_a_session_that_a_user_has_suspended_is_resumed_and_not_woken() -> None:
    with pytest.raises(Misused, match="kubectl tinsmith resume qwen"):
        requests.wake(session(SUSPENDED), AT)


@pytest.mark.parametrize(
    ("ask", "instead"),
    [
        (requests.suspend, "kubectl scale samplerpool draws --replicas=0"),
        (requests.resume, "kubectl scale samplerpool draws --replicas=N"),
        (lambda family: requests.snapshot(family, AT), "only a TrainingSession takes snapshots"),
    ],
    ids=["suspend", "resume", "snapshot"],
)
def test_a_pool_is_no_session_and_says_what_to_do_instead(ask: Callable[[Family], Request], instead: str) -> None:
    with pytest.raises(Misused, match=instead):
        ask(pool(families.ready()))


@pytest.mark.parametrize("ask", [requests.snapshot, requests.restart])
def test_a_suspended_session_has_nothing_to_snapshot_or_to_restart(ask: Callable[[Family, Any], Request]) -> None:
    with pytest.raises(Misused, match="is suspended"):
        ask(session(SUSPENDED), AT)


def test_a_snapshot_is_done_when_the_operator_says_that_this_request_was_answered() -> None:
    request = requests.snapshot(session(families.ready()), AT)
    asked, taken = "2026-01-02T03:04:05Z", "2026-01-02T03:00:00Z"
    assert request.patch == {"metadata": {"annotations": {"tinsmith.dev/snapshot-requested-at": asked}}}
    assert request.outcome(session(families.ready(), lastSnapshotTime=taken)) is None
    another = session(families.ready(), lastSnapshotTime=taken, requests={"snapshot": "2026-01-01T00:00:00Z"})
    assert request.outcome(another) is None
    done = session(families.ready(), lastSnapshotTime=taken, requests={"snapshot": asked})
    assert "has a snapshot" in (request.outcome(done) or "")


def test_a_refused_snapshot_is_distinguished_from_a_taken_one() -> None:
    asked = requests.written(AT)
    for earlier in ({}, {"lastSnapshotTime": "2026-01-02T03:03:00Z"}):
        request = requests.snapshot(session(families.ready(), **earlier), AT)
        with pytest.raises(RequestFailed, match=r"refused .*`kubectl tinsmith why session/qwen`"):
            request.outcome(session(families.ready(), requests={"snapshot": asked}, **earlier))


def test_a_restart_is_done_when_no_pod_from_before_is_left_and_the_new_one_is_ready() -> None:
    request = requests.restart(session(families.ready(), pod("old")), AT)
    assert request.patch == {"metadata": {"annotations": {"tinsmith.dev/restart-requested-at": "2026-01-02T03:04:05Z"}}}
    assert request.outcome(session(families.ready(), pod("old"))) is None
    assert request.outcome(session(families.ready())) is None
    assert request.outcome(session(families.unready("LoadingModel", moving=True), pod("new", is_ready=False))) is None
    assert "is ready" in (request.outcome(session(families.ready(), pod("new"))) or "")


def test_a_restart_that_is_not_begun_does_not_stumble_over_an_old_trouble() -> None:
    stuck = families.unready("ModelNotFound", stalled=True)
    request = requests.restart(session(stuck, pod("old")), AT)
    assert request.outcome(session(stuck, pod("old"))) is None
    with pytest.raises(RequestFailed, match="ModelNotFound"):
        request.outcome(session(stuck, pod("new")))


def test_a_pool_has_restarted_when_all_replicas_are_new() -> None:
    request = requests.restart(pool(families.ready(), pod("a"), pod("b")), AT)
    assert request.outcome(pool(families.ready(), pod("b"), pod("c"))) is None
    assert request.outcome(pool(families.ready(), pod("c"))) is None
    assert request.outcome(pool(families.ready(), pod("c"), pod("d"))) is not None


class Steps:
    """A simulated family with its own clock and sleep."""

    def __init__(self, *families: Family | Exception) -> None:
        self._families: Iterator[Family | Exception] = iter(families)
        self._last = families[-1]
        self.seconds = 0.0
        self.messages: list[str] = []

    def look(self) -> Family:
        seen = next(self._families, self._last)
        if isinstance(seen, Exception):
            raise seen
        return seen

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def wait(self, request: Request, timeout_seconds: float = 60) -> str:
        return wait_for(
            self.look,
            request.outcome,
            name="session/qwen",
            timeout_seconds=timeout_seconds,
            progress=self.messages.append,
            clock=lambda: self.seconds,
            sleep=self.sleep,
        )


@pytest.mark.parametrize("reason", [each for each in Reason if each.progress is Progress.MOVING], ids=str)
def test_a_resume_reports_a_temporary_problem_and_waits_for_its_end(reason: Reason) -> None:
    """An autoscaler may bring the node that an unschedulable pod waits for."""
    finding = found(reason, "This is the matter.")
    states = standard_conditions(finding, finding, None)
    said = [families.condition(each.type, each.truth, each.finding.reason, each.finding.message) for each in states]
    steps = Steps(session(SUSPENDED), session(said), session(said), session(families.ready()))
    assert "is ready" in steps.wait(requests.resume(session(SUSPENDED)))
    assert steps.messages[1:] == [f"{reason}: {finding.message}"]


def test_waiting_ends_with_the_reason_and_the_next_command() -> None:
    steps = Steps(session(families.unready("LoadingModel", moving=True)))
    with pytest.raises(RequestFailed, match=r"within 10s\. Last seen: LoadingModel: .*why session/qwen`"):
        steps.wait(requests.resume(session(SUSPENDED)), timeout_seconds=10)
    assert 10 <= steps.seconds < 14


def test_waiting_reports_each_reason_once_and_outlasts_an_unreachable_cluster() -> None:
    away = ClusterUnreachable("No cluster answers.")
    stopping = session(families.unready("Suspending", "It stops.", moving=True))
    steps = Steps(session(families.ready()), away, away, stopping, stopping, session(SUSPENDED))
    assert "is suspended" in steps.wait(requests.suspend(session(families.ready())))
    assert steps.messages == [
        "WorkerReady: The worker serves Qwen/Qwen3-8B.",
        "No cluster answers.",
        "Suspending: It stops.",
    ]


def test_waiting_ends_at_once_when_the_resource_is_deleted() -> None:
    steps = Steps(session(families.ready()), NotFound("There is no TrainingSession qwen here."))
    with pytest.raises(NotFound):
        steps.wait(requests.suspend(session(families.ready())))
    assert steps.seconds < 5
