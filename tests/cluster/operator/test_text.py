"""Any text that a user or a worker may write reaches the API server, and stops nothing."""

from __future__ import annotations

from typing import Any

import pytest
from support.kubernetes.kubectl import KubectlUser, Kubelet, ready_status
from support.operator.operators import (
    comes_to_rest,
    condition_of,
    eventually,
    pool_manifest,
    running,
    session_manifest,
    settings_for,
)
from tinsmith_operator.kube.resources import PODS, POOLS, SESSIONS, WORKLOADS, Resource

TEXTS = {
    "ASTRAL": "\N{ROCKET}\N{CJK UNIFIED IDEOGRAPH-20000}\U0010ffff",
    "CONTROLS": "a\tb\nc\rd\x01\x1b\x7f",
    "C1": "\x80\x85\x9f",
    "BREAKS": "a\u2028b\u2029c",
    "MARKS": "\ufeff\ufffe\uffff\u200b",
    "ESCAPES": "\\ud83d\\ude00 \\\\ \" '",
    "YAML": "- {a: &b *c} # ~ !!null",
    "LONG": "\N{ROCKET}é" * 2048,
}
ODD = "r\N{ROCKET}\u00e9\u85e4"
LAST_WORDS = "RuntimeError: \N{COLLISION SYMBOL} out of \N{MATHEMATICAL BOLD CAPITAL A}"
CRASHES = {
    "restartCount": 3,
    "ready": False,
    "started": False,
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": f"Traceback\n{LAST_WORDS}"}},
}


def odd_session() -> dict[str, Any]:
    claim = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "models", "path": f"{ODD}/{ODD}"}}
    pod = {
        "env": [{"name": name, "value": text} for name, text in TEXTS.items()],
        "annotations": {f"example.com/{name}": text for name, text in TEXTS.items()},
    }
    return session_manifest(model={"name": ODD, "source": claim}, pod=pod)


async def test_a_session_with_any_text_in_it_is_changed_and_suspended(hands: KubectlUser, kubelet: Kubelet) -> None:
    async with running(settings_for(hands.namespace)):
        await hands.create(SESSIONS, odd_session())
        await comes_to_rest(hands, "WorkerReady")
        assert TEXTS.items() <= (await texts_of_the_pod(hands)).items()
        # Created as JSON, changed by an apply.
        await hands.patch(SESSIONS, "tiny", {"spec": {"adapters": {"slots": 3}}})
        await comes_to_rest(hands, "WorkerReady")
        assert TEXTS.items() <= (await texts_of_the_pod(hands)).items()
        await hands.patch(SESSIONS, "tiny", {"spec": {"suspend": True}})
        await comes_to_rest(hands, "Suspended")
        workload = await hands.get(WORKLOADS, "tiny")
        assert workload is not None
        assert workload["spec"]["replicas"] == 0


@pytest.mark.parametrize("resource", [SESSIONS, POOLS], ids=["session", "pool"])
async def test_a_crash_loop_is_reported_with_any_termination_message(
    hands: KubectlUser, kubelet: Kubelet, resource: Resource
) -> None:
    ready, manifest = (
        ("WorkerReady", session_manifest()) if resource is SESSIONS else ("ReplicasReady", pool_manifest())
    )
    async with running(settings_for(hands.namespace)):
        await hands.create(resource, manifest)
        await comes_to_rest(hands, ready, resource=resource)
        [pod] = await hands.all(PODS)
        status = ready_status(pod, **CRASHES)
        for condition in status["conditions"]:
            condition["status"] = str(condition["type"] != "Ready")
        await hands.patch(PODS, pod["metadata"]["name"], {"status": status}, "status")

        async def says() -> str:
            return str(condition_of(await hands.get(resource, "tiny"), "Ready").get("message"))

        async def quotes() -> bool:
            return LAST_WORDS in await says()

        await eventually(quotes, "the Ready condition quotes the worker")
        assert condition_of(await hands.get(resource, "tiny"), "Ready")["status"] == "False"


async def texts_of_the_pod(hands: KubectlUser) -> dict[str, str]:
    workload = await hands.get(WORKLOADS, "tiny")
    assert workload is not None
    [worker] = workload["spec"]["template"]["spec"]["containers"]
    annotations = workload["spec"]["template"]["metadata"]["annotations"]
    assert TEXTS.items() <= {name.removeprefix("example.com/"): text for name, text in annotations.items()}.items()
    return {variable["name"]: variable.get("value", "") for variable in worker["env"]}
