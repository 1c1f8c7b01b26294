"""Sessions whose pods are in a certain state, and the conditions that they have then."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

from support.operator.resources import session_manifest
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.status import Condition, TrainingSessionStatus
from tinsmith_operator.common.actions import WriteStatus
from tinsmith_operator.common.conditions import FIRST_STATUS_WAIT
from tinsmith_operator.common.observed import KubernetesWarning
from tinsmith_operator.session.decision import decide

POD = ("Pod", "qwen-0")
NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available."


def ready_world(**spec: Any) -> World:
    world = World(session_manifest(**spec))
    world.settle()
    return world


def starting_world(pod_status: Manifest | None = None, node: str | None = None) -> World:
    """Return a world whose pod has existed, with this status, for as long as a first status waits for it."""
    world = World(session_manifest())
    for _ in range(3):
        world.operate()
        world.binder_works()
    world.controller_works()
    world.objects[POD]["status"] = pod_status or {}
    if node:
        world.objects[POD]["spec"]["nodeName"] = node
    world.time_passes(FIRST_STATUS_WAIT)
    return world


def conditions(world: World, **observed: Any) -> dict[str, Condition]:
    """Return the conditions after the next decision."""
    seen = replace(world.observe(), **observed)
    written = [
        each.status for each in decide(seen, world.installation, world.now).actions if isinstance(each, WriteStatus)
    ]
    status = TrainingSessionStatus.model_validate(written[0]) if written else seen.session.status
    return {condition.type: condition for condition in status.conditions}


def unscheduled(message: str) -> Manifest:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}


def waiting(reason: str, message: str = "") -> Manifest:
    return container({"waiting": {"reason": reason, "message": message}})


def container(state: Manifest, last: Manifest | None = None, restarts: int = 0) -> Manifest:
    status = {"name": "worker", "state": state, "lastState": last or {}, "restartCount": restarts, "ready": False}
    return {"conditions": [{"type": "PodScheduled", "status": "True"}], "containerStatuses": [status]}


def ended(exit_code: int = 1, reason: str = "Error", record: Manifest | None = None) -> Manifest:
    message = json.dumps(record) if record else ""
    last = {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}}
    return container({"waiting": {"reason": "CrashLoopBackOff"}}, last, restarts=3)


def refused(reason: str, message: str = "No model in /models/qwen. Put one there.") -> Manifest:
    return ended(3, record={"reason": reason, "message": message})


def warn(world: World, place: tuple[str, str], reason: str, message: str, age_minutes: int = 0) -> None:
    uid = world.objects[place]["metadata"]["uid"]
    at = world.now - timedelta(minutes=age_minutes)
    world.warnings.append(KubernetesWarning(place[0], uid, reason, message, at))
