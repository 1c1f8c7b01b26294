"""The state follows from what a session says now, not from how it came to say it."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import comes_to_rest, running, session_manifest, settings_for
from tinsmith_operator.kube.resources import POLICIES, SERVICES, SESSIONS, WORKLOADS

LAST: dict[str, Any] = {
    "adapters": {"slots": 4, "maxRank": 16},
    "resources": {"limits": {"memory": "2Gi"}},
    "sampling": "None",
    "suspend": False,
    "pod": {"labels": {"team": "a"}, "image": "tinsmith.local/tinsmith/trainer:0.3.0"},
}
CHOICES: dict[str, list[Any]] = {
    "adapters": [{"slots": slots, "maxRank": rank} for slots in (1, 4, 200) for rank in (8, 512)],
    "resources": [{}, {"requests": {"cpu": "500m"}}, {"limits": {"memory": "1Gi"}}],
    "sampling": ["None", "Colocated"],
    "suspend": [True, False],
    "pod": [
        {},
        {"nodeSelector": {"disk": "fast"}, "terminationGracePeriodSeconds": 90},
        {"env": [{"name": "A", "value": "1"}], "sharedMemory": "1Gi"},
        {"tolerations": [{"key": "gpu", "operator": "Exists"}], "image": "tinsmith.local/tinsmith/trainer:0.2.0"},
    ],
}


@pytest.mark.parametrize("seed", range(4))
async def test_any_way_to_a_spec_ends_where_the_straight_way_does(
    hands: KubectlUser, kubelet: Kubelet, seed: int
) -> None:
    chance = random.Random(seed)
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, session_manifest("straight", **LAST))
        await hands.create(SESSIONS, session_manifest("winding"))
        for _ in range(8):
            await say(hands, {name: chance.choice(values) for name, values in CHOICES.items()})
            await asyncio.sleep(chance.choice([0, 0, 0.3]))
        await say(hands, LAST)
        for name in ("straight", "winding"):
            await comes_to_rest(hands, "WorkerReady", name)
        for resource in (WORKLOADS, SERVICES, POLICIES):
            straight, winding = [await hands.get(resource, name) for name in ("straight", "winding")]
            assert straight is not None
            assert winding is not None
            assert comparable(winding, "winding") == comparable(straight, "straight")


async def say(hands: KubectlUser, spec: dict[str, Any]) -> None:
    """Write all of these fields, as `kubectl apply` does: fields that are not named are removed."""
    live = await hands.get(SESSIONS, "winding")
    assert live is not None
    patch = {name: replaced(live["spec"].get(name), value) for name, value in spec.items()}
    await hands.patch(SESSIONS, "winding", {"spec": patch})


def replaced(old: Any, new: Any) -> Any:
    """Return the merge patch from one value to the other."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {name: replaced(old.get(name), new.get(name)) for name in old.keys() | new.keys()}


def comparable(manifest: dict[str, Any], name: str) -> str:
    """Return what the operator wants of it, with names that both sessions share. The claim's UID names the worker."""
    metadata = manifest["metadata"]
    kept = {"labels": metadata["labels"], "spec": manifest["spec"]}
    text = repr(kept).replace(name, "NAME")
    # Allocated, and by UID.
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|'[0-9a-f]{16,64}'", "ID", text)
