"""A template keeps as many sessions without models as it asks for, and replaces outdated ones one after the other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from support.operator.resources import NOW, ON_CLAIM, session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.api.names import API_VERSION, RETIRED_ANNOTATION, TEMPLATE_KIND, TEMPLATE_LABEL
from tinsmith_operator.api.session_template import SessionTemplate, parse_template
from tinsmith_operator.api.training_session import parse_pending, parse_session
from tinsmith_operator.common.actions import Annotate, Create, Decision, Emit, WriteStatus
from tinsmith_operator.session.template import decide_pending, exempted
from tinsmith_operator.template.decision import decide_template
from tinsmith_operator.template.situation import ObservedTemplate

DELETES: Manifest = {"retentionPolicy": {"whenDeleted": "Delete"}}
MODEL: Manifest = {"name": "Qwen/Qwen3-8B", "source": ON_CLAIM}


def template_manifest(**spec: Any) -> Manifest:
    metadata = {"name": "qwen", "namespace": "research", "uid": "u", "generation": 2, "resourceVersion": "1"}
    spec = {"model": MODEL, "storage": DELETES, "maxSessions": 4, "warm": 2, **spec}
    return {"apiVersion": API_VERSION, "kind": TEMPLATE_KIND, "metadata": metadata, "spec": spec}


def template(**spec: Any) -> SessionTemplate:
    return parse_template(template_manifest(**spec))


def member(
    number: int,
    *,
    copy_of: SessionTemplate | None = None,
    ready: bool = True,
    used: int | None = 0,
    reason: str = "WorkerReady",
    annotations: Manifest | None = None,
) -> Manifest:
    """Return a session of the template, with a copy of its present spec or another one."""
    now = format_time(NOW)
    condition = {"type": "Ready", "status": str(ready), "reason": reason, "message": "m", "lastTransitionTime": now}
    adapters = {"used": used, "capacity": 8, "summary": f"{used}/8"} if used is not None else None
    return {
        "metadata": {
            "name": f"qwen-{number}",
            "uid": f"uid-{number}",
            "resourceVersion": "7",
            "labels": {TEMPLATE_LABEL: "qwen"},
            "annotations": annotations or {},
        },
        "spec": {"templateRef": {"name": "qwen"}},
        "status": {
            "conditions": [condition],
            "template": (copy_of or template()).copy.to_manifest(),
            **({"adapters": adapters} if adapters else {}),
        },
    }


def outdated(number: int, **fields: Any) -> Manifest:
    return member(number, copy_of=template(numerics="exact"), **fields)


def decided(*members: Manifest, paused: bool = False, **spec: Any) -> Decision:
    manifest = template_manifest(**spec)
    manifest["metadata"]["annotations"] = {"tinsmith.dev/paused": "true"} if paused else {}
    taken = {each["metadata"]["name"] for each in members}
    free = tuple(number for number in range(1, 10) if f"qwen-{number}" not in taken)
    observed = ObservedTemplate(template=parse_template(manifest), sessions=members, free_numbers=free, refusals={})
    return decide_template(observed, NOW)


def created(decision: Decision) -> list[str]:
    return [each.manifest["metadata"]["name"] for each in decision.actions if isinstance(each, Create)]


def retired(decision: Decision) -> list[str]:
    return [each.name for each in decision.actions if isinstance(each, Annotate)]


def status_of(decision: Decision) -> Manifest:
    return next(each.status for each in decision.actions if isinstance(each, WriteStatus))


def ready_reason(decision: Decision) -> str:
    return str(next(each["reason"] for each in status_of(decision)["conditions"] if each["type"] == "Ready"))


@pytest.mark.parametrize(
    ("members", "names"),
    [
        ((), ["qwen-1", "qwen-2"]),
        ((member(1, ready=False, used=None),), ["qwen-2"]),
        ((member(1), member(2)), []),
        ((member(1, used=3), member(2)), ["qwen-3"]),
        ((member(1, used=3), member(2, used=1), member(3, used=1)), ["qwen-4"]),
        ((outdated(1), outdated(2)), []),
        ((member(1, reason="DeadlineExceeded", ready=False), member(2)), ["qwen-3"]),
    ],
    ids=["none", "one is coming", "enough", "one in use", "no room for more", "outdated ones serve", "a spent one"],
)
def test_missing_warm_sessions_are_created_up_to_the_limit(members: tuple[Manifest, ...], names: list[str]) -> None:
    assert created(decided(*members)) == names


def test_a_warm_session_says_nothing_but_the_name_of_its_template() -> None:
    (session,) = (each.manifest for each in decided(warm=1).actions if isinstance(each, Create))
    assert session["spec"] == {"templateRef": {"name": "qwen"}}
    assert session["metadata"]["labels"][TEMPLATE_LABEL] == "qwen"


@pytest.mark.parametrize(
    ("members", "names"),
    [
        ((outdated(1), outdated(2)), ["qwen-1"]),
        ((member(1), outdated(2), outdated(3)), ["qwen-2"]),
        ((outdated(1, used=1), member(2), member(3)), []),
        ((member(1, ready=False), outdated(2)), []),
        ((outdated(1, annotations={RETIRED_ANNOTATION: "t"}), outdated(2)), []),
        ((outdated(1, ready=False), outdated(2)), ["qwen-1"]),
    ],
    ids=[
        "one at a time",
        "more than needed",
        "in use",
        "a successor comes",
        "another leaves",
        "first what is not ready",
    ],
)
def test_outdated_sessions_without_models_are_retired_one_by_one(
    members: tuple[Manifest, ...], names: list[str]
) -> None:
    assert retired(decided(*members)) == names


def test_a_session_that_leaves_its_volume_behind_is_not_replaced() -> None:
    keeps = template(storage={"retentionPolicy": {"whenDeleted": "Retain"}})
    assert retired(decided(member(1, copy_of=keeps), member(2, copy_of=keeps))) == []


def test_only_the_spec_of_sessions_makes_a_copy_outdated() -> None:
    assert retired(decided(member(1), member(2), warm=1, maxSessions=9)) == []


def test_a_paused_template_is_only_reported() -> None:
    assert {type(each) for each in decided(outdated(1), paused=True).actions} == {WriteStatus, Emit}


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ((member(1), member(2)), "TemplateReady"),
        ((member(1), member(2, ready=False)), "Warming"),
        (tuple(member(number, used=1) for number in (1, 2, 3, 4)), "AllSessionsUsed"),
    ],
)
def test_the_condition_says_whether_the_warm_sessions_are_ready(members: tuple[Manifest, ...], reason: str) -> None:
    assert ready_reason(decided(*members)) == reason


def test_the_status_names_the_warm_sessions_and_counts_the_others() -> None:
    status = status_of(decided(member(1, used=1), outdated(2), member(3)))
    counts = {name: status[name] for name in ("sessions", "summary", "readyWarm", "stale", "warmSessions")}
    assert counts == {
        "sessions": 3,
        "summary": "3/4",
        "readyWarm": 2,
        "stale": 1,
        "warmSessions": ["qwen-2", "qwen-3"],
    }


# ---- the session's side


def pending_session() -> Manifest:
    manifest = session_manifest()
    return {**manifest, "spec": {"templateRef": {"name": "qwen"}, "suspend": False}}


def test_a_session_runs_by_the_copy_of_its_template_and_later_changes_do_not_reach_it() -> None:
    manifest = pending_session()
    pending = parse_pending(manifest)
    assert pending is not None
    manifest["status"] = status_of(decide_pending(pending, template(numerics="exact"), NOW))
    assert parse_pending(manifest) is None
    session = parse_session(manifest)
    assert session.spec.model.name == "Qwen/Qwen3-8B"
    assert session.spec.numerics == "exact"
    manifest["spec"]["suspend"] = True
    assert parse_session(manifest).spec.suspend


def test_a_session_without_its_template_waits_and_says_so() -> None:
    pending = parse_pending(pending_session())
    assert pending is not None
    decision = decide_pending(pending, None, NOW)
    assert ready_reason(decision) == "TemplateNotFound"
    message = status_of(decision)["conditions"][0]["message"]
    assert "SessionTemplate research/qwen (spec.templateRef) does not exist. Create the SessionTemplate" in message


def test_the_idle_policy_does_not_apply_to_a_warm_session() -> None:
    session = parse_session(session_manifest("qwen-1", idle={"suspendAfterSeconds": 600}))
    manifest = template_manifest()
    assert exempted(session, parse_template(manifest)).spec.idle is not None
    manifest["status"] = {"warmSessions": ["qwen-1"]}
    assert exempted(session, parse_template(manifest)).spec.idle is None


def test_a_retired_session_is_deleted_after_a_report_that_it_holds_no_model() -> None:
    world = World(session_manifest(storage=DELETES))
    world.settle()
    world.worker_reports(adapters_used=0)
    world.settle()
    world.user_annotates(RETIRED_ANNOTATION, format_time(world.now))
    world.settle()
    assert world.session is not None, "a model may have been placed before the API servers knew"
    world.time_passes(timedelta(seconds=6))
    world.settle()
    assert world.session is not None, "the last report is older than the retirement"
    world.worker_reports(adapters_used=0)
    world.settle()
    assert world.session is None or "deletionTimestamp" in world.session["metadata"]


def test_a_retired_session_with_a_model_stays() -> None:
    world = World(session_manifest(storage=DELETES))
    world.settle()
    world.user_annotates(RETIRED_ANNOTATION, format_time(world.now))
    world.time_passes(timedelta(seconds=60))
    world.worker_reports(adapters_used=1)
    world.settle()
    assert world.session is not None
    assert "deletionTimestamp" not in world.session["metadata"]
