"""The tree of `status`: most urgent first, each fact once, the same text in a file as on a screen."""

from __future__ import annotations

import json
from typing import Any

from support.kubernetes import families
from tinsmith.cluster.families import Family, Kind, assemble
from tinsmith.cluster.status_tree import as_json, status_tree
from tinsmith.console import draw

Manifest = dict[str, Any]


def families_of(*owners: Manifest, children: list[Manifest] | None = None) -> tuple[Family, ...]:
    by_kind = {kind: [owner for owner in owners if owner["kind"] == kind.kind] for kind in Kind}
    return assemble(by_kind, children or [])


def drawn(*owners: Manifest, children: list[Manifest] | None = None, with_namespaces: bool = False) -> str:
    branches = status_tree(families_of(*owners, children=children), families.NOW, with_namespaces=with_namespaces)
    return "".join(f"{line.plain}\n" for line in draw(branches))


def test_a_healthy_session_shows_its_objects() -> None:
    session = families.session(
        conditions=families.ready(),
        adapters={"used": 3, "capacity": 8, "summary": "3/8"},
        progress={"step": 120, "tokensPerSecond": 5100, "lastActivityTime": families.time_ago(seconds=40)},
        lastSnapshotTime=families.time_ago(minutes=2),
        endpoint="qwen.research.svc:7443",
    )
    children = [families.workload(session), families.pod("qwen-0", of=session, restartCount=1), families.claim(session)]
    assert drawn(session, children=children) == (
        "session/qwen, ready\n"
        "├─ Ready WorkerReady, SlotsAvailable SlotsFree; not Reconciling, Stalled, Degraded\n"
        "├─ Qwen/Qwen3-8B on peft, adapters 3/8, step 120, 5100 tokens/s, last activity 40s ago, "
        "last snapshot 2m ago, endpoint qwen.research.svc:7443\n"
        "├─ statefulset/qwen, 1 of 1 ready\n"
        "├─ pod/qwen-0 on node-1, Running, ready, 1 restart, made 2h ago\n"
        "└─ persistentvolumeclaim/qwen-journal, Bound, 10Gi\n"
    )


def test_a_session_of_several_nodes_counts_the_head_and_its_workers() -> None:
    session = families.session(conditions=families.unready("WaitingForMembers", moving=True))
    spec = {"workerGroupSpecs": [{"replicas": 2}]}
    pods = [families.pod("qwen-head-x", of=session), families.pod("qwen-members-a", of=session, is_ready=False)]
    cluster = families.child("RayCluster", "qwen", of=session, spec=spec)
    assert "raycluster/qwen, 1 of 3 ready" in drawn(session, children=[*pods, cluster])
    suspended = families.child("RayCluster", "qwen", of=session, spec={**spec, "suspend": True})
    assert "raycluster/qwen, 0 of 0 ready" in drawn(session, children=[suspended])


def test_a_session_that_needs_attention_says_what_to_do() -> None:
    cure = "The image nowhere:1 cannot be pulled: not found; correct spec.pod.image."
    session = families.session(conditions=families.unready("ImagePullFailed", cure, stalled=True))
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "back-off"}}
    children = [families.pod("qwen-0", of=session, is_ready=False, state=waiting)]
    assert drawn(session, children=children) == (
        "session/qwen, not ready: ImagePullFailed\n"
        f"├─ {cure}\n"
        "├─ Stalled ImagePullFailed; not Ready, Reconciling, Degraded; unknown: SlotsAvailable\n"
        "├─ Qwen/Qwen3-8B on peft\n"
        "└─ pod/qwen-0 on node-1, ImagePullBackOff, 0 restarts, made 2h ago\n"
    )


def test_a_pool_shows_its_namespace_and_its_replicas() -> None:
    pool = families.pool(conditions=families.ready("2 replicas serve."), replicas=2, readyReplicas=2)
    pods = [families.pod(f"draws-sampler-{end}", of=pool) for end in "ba"]
    assert drawn(pool, children=[*pods, families.workload(pool, desired=2, are_ready=2)], with_namespaces=True) == (
        "pool/draws in research, ready\n"
        "├─ Ready WorkerReady, SlotsAvailable SlotsFree; not Reconciling, Stalled, Degraded\n"
        "├─ Qwen/Qwen3-8B on builtin, 2 of 2 replicas ready\n"
        "├─ deployment/draws-sampler, 2 of 2 ready\n"
        "├─ pod/draws-sampler-a on node-1, Running, ready, 0 restarts, made 2h ago\n"
        "└─ pod/draws-sampler-b on node-1, Running, ready, 0 restarts, made 2h ago\n"
    )


def test_a_session_in_transition_shows_each_change_that_is_incomplete() -> None:
    hint = "0.2.0 is the new default image; restart the session to use it."
    upgrade = families.condition("UpgradeAvailable", "True", "NewDefaultImage", hint)
    session = families.session(conditions=[*families.ready(), upgrade])
    session["metadata"]["generation"] = 2
    pod = families.pod("qwen-0", of=session)
    pod["metadata"]["deletionTimestamp"] = families.time_ago(seconds=1)
    lines = drawn(session, children=[pod, families.claim(session, size="10Gi", desired="20Gi")]).splitlines()
    assert "├─ the spec has changed; the operator has not processed it yet" in lines
    assert f"├─ {hint}" in lines
    assert "├─ pod/qwen-0 on node-1, stopping, 0 restarts, made 2h ago" in lines
    assert "└─ persistentvolumeclaim/qwen-journal, Bound, 10Gi, growing to 20Gi" in lines


def test_the_most_urgent_come_first() -> None:
    degraded = families.ready()
    degraded[-1] = families.condition("Degraded", "True", "ClaimTerminating")
    order = [
        line.split(",")[0]
        for line in drawn(
            families.session("well", families.ready()),
            families.session("asleep", families.unready("Suspended")),
            families.session("moving", families.unready("LoadingModel", moving=True)),
            families.session("threatened", degraded),
            families.session("unseen"),
            families.session("stuck", families.unready("QuotaExceeded", stalled=True)),
            families.pool("stuck-too", families.unready("ImagePullFailed", stalled=True)),
        ).splitlines()
        if not line.startswith(("├", "└"))
    ]
    assert order == [
        "session/stuck",
        "pool/stuck-too",
        "session/unseen",
        "session/threatened",
        "session/moving",
        "session/asleep",
        "session/well",
    ]


def test_a_session_that_no_operator_has_seen_says_where_to_look() -> None:
    assert "see whether Tinsmith's operator runs, and whether it watches the namespace research" in drawn(
        families.session()
    )


def test_scripts_get_the_same_facts_in_the_same_order() -> None:
    stuck = families.session("stuck", families.unready("QuotaExceeded", "Raise the quota.", stalled=True))
    pool = families.pool(conditions=families.ready())
    listed = as_json(families_of(pool, stuck, children=[families.pod("draws-x", of=pool, restartCount=2)]))
    assert json.loads(json.dumps(listed)) == listed
    first, second = listed
    assert (first["name"], first["health"], first["message"]) == ("stuck", "stuck", "Raise the quota.")
    assert (second["kind"], second["ready"]) == ("SamplerPool", True)
    assert second["pods"] == [{"name": "draws-x", "node": "node-1", "state": "Running, ready", "restarts": 2}]


def test_a_certificate_says_how_long_it_lasts_or_that_it_has_ended() -> None:
    for expiry, words in (
        ("2026-01-12T03:04:05Z", "certificate ends in 10d"),
        ("2026-01-02T02:04:05Z", "ended 1h ago"),
    ):
        assert words in drawn(families.session(conditions=families.ready(), certificateExpiryTime=expiry))
