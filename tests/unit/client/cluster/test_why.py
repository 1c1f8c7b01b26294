"""`why`: an answer, followed only by evidence for it."""

from __future__ import annotations

from typing import Any

from support.kubernetes import families
from tinsmith.cluster.families import Family, Kind, assemble
from tinsmith.cluster.why import NamespaceFacts, explain
from tinsmith.console import draw

Manifest = dict[str, Any]


def family_of(owner: Manifest, *children: Manifest) -> Family:
    [family] = assemble({kind: [owner] if owner["kind"] == kind.kind else [] for kind in Kind}, children)
    return family


def answer(family: Family, **namespace_facts: Any) -> str:
    branches = explain(family, NamespaceFacts(**namespace_facts), families.NOW)
    return "".join(f"{line.plain}\n" for line in draw(branches))


def test_a_pod_without_a_node_is_explained_by_the_scheduler() -> None:
    cure = "The scheduler finds no node: 0/3 nodes are available; add a node that fits."
    session = families.session(conditions=families.unready("Unschedulable", cure, moving=True))
    pod = families.pod("qwen-0", of=session, node=None, is_ready=False)
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes available"}
    pod["status"]["conditions"] = [scheduled]
    events = (
        families.event(pod, "FailedScheduling", "0/3 nodes available", count=4, minutes=3),
        families.event(session, "Unschedulable", cure, type_="Normal", minutes=4),
        families.event(families.session("other"), "CrashLoop", "not ours", minutes=1),
    )
    assert answer(family_of(session, pod, families.claim(session, phase="Pending")), events=events) == (
        "TrainingSession qwen is not ready: Unschedulable\n"
        f"{cure}\n"
        "persistentvolumeclaim/qwen-journal is Pending, of fast\n"
        "pod/qwen-0 on no node\n"
        "└─ not PodScheduled: Unschedulable: 0/3 nodes available\n"
        "events, newest first\n"
        "├─ 3m ago, 4 times, warning FailedScheduling of pod/qwen-0: 0/3 nodes available\n"
        f"└─ 4m ago, Unschedulable of trainingsession/qwen: {cure}\n"
    )


def test_a_worker_that_keeps_ending_shows_how_it_ended() -> None:
    session = families.session(conditions=families.unready("CrashLoop", "It ended with 1; read its log.", stalled=True))
    ending = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": families.time_ago(minutes=1)}
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}
    pod = families.pod(
        "qwen-0", of=session, is_ready=False, state={"waiting": waiting}, lastState={"terminated": ending}
    )
    assert (
        "pod/qwen-0 on node-1\n"
        "├─ container worker: waiting, CrashLoopBackOff: back-off 5m0s\n"
        "└─ container worker, the run before: ended 1m ago with status 137, OOMKilled\n"
    ) in answer(family_of(session, pod))


def test_a_quota_is_evidence_where_no_pod_could_be_made() -> None:
    session = families.session(conditions=families.unready("QuotaExceeded", "The pod cannot be created.", stalled=True))
    quota = {
        "kind": "ResourceQuota",
        "metadata": {"name": "small", "namespace": families.NAMESPACE},
        "status": {"hard": {"limits.memory": "64Gi"}, "used": {"limits.memory": "60Gi"}},
    }
    assert "resourcequota/small\n└─ limits.memory: 60Gi of 64Gi\n" in answer(family_of(session), quotas=(quota,))
    with_pod = family_of(session, families.pod("qwen-0", of=session))
    assert "resourcequota" not in answer(with_pod, quotas=(quota,))


def test_a_ready_session_that_is_threatened_says_so_first() -> None:
    conditions = families.ready()
    conditions[-1] = families.condition("Degraded", "True", "ClaimTerminating", "The claim is being deleted.")
    shown = answer(family_of(families.session(conditions=conditions)))
    assert shown.splitlines()[:2] == ["TrainingSession qwen is ready: ClaimTerminating", "The claim is being deleted."]


def test_unreadable_objects_are_listed_at_the_end() -> None:
    session = families.session(conditions=families.unready("CrashLoop"))
    shown = answer(family_of(session), unread=("events not shown: Your rights do not allow it.",))
    assert shown.endswith("events not shown: Your rights do not allow it.\n")
