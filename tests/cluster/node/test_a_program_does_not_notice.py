"""Deaths while a program trains: it ends with the weights of an undisturbed run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cluster.node.conftest import API_SERVERS, CHILDREN, OPERATORS, SESSION, Run
from support.client.pipelined_program import Ending
from support.kubernetes.installation import Installation, wait_for

POD = f"{SESSION}-0"


def kill_the_worker(installation: Installation) -> None:
    installation.cluster.kill_container(installation.namespace, POD, "worker")


def delete_the_pod_without_grace(installation: Installation) -> None:
    installation.kubectl("delete", "pod", POD, "--grace-period=0", "--force")


def delete_the_pod(installation: Installation) -> None:
    installation.kubectl("delete", "pod", POD, "--wait=false")


def kill_an_api_server(installation: Installation) -> None:
    """Kill an API server while it holds some of the program's polls."""
    installation.kill_api_servers(1)


def kill_all_api_servers(installation: Installation) -> None:
    installation.kill_api_servers(API_SERVERS)


def roll_the_api_servers(installation: Installation) -> None:
    deployment = f"deployment/{installation.release}-api-server"
    installation.kubectl("rollout", "restart", deployment)
    installation.kubectl("rollout", "status", deployment, "--timeout=300s")


def suspend_and_resume(installation: Installation) -> None:
    installation.patch("trainingsession", SESSION, {"spec": {"suspend": True}})
    installation.wait_reason(SESSION, "Suspended")
    assert installation.get("pod", POD) is None
    installation.patch("trainingsession", SESSION, {"spec": {"suspend": False}})


def change_the_slots(installation: Installation) -> None:
    """Change the pod's template: the worker snapshots, ends, and starts anew."""
    before = (installation.get("pod", POD) or {})["metadata"]["uid"]
    slots = (installation.get("trainingsession", SESSION) or {})["spec"]["adapters"]["slots"]
    installation.patch("trainingsession", SESSION, {"spec": {"adapters": {"slots": slots + 1}}})

    def replaced() -> bool:
        pod = installation.get("pod", POD)
        return pod is not None and pod["metadata"]["uid"] != before

    wait_for(replaced, 120, lambda: "the pod was not replaced")


def delete_every_child(installation: Installation) -> None:
    """Delete every child. The StatefulSet takes its pod with it."""
    for kind, pattern, _ in CHILDREN:
        installation.kubectl("delete", kind, pattern.format(SESSION), "--wait=false")


def edit_every_child(installation: Installation) -> None:
    for kind, pattern, edit in CHILDREN:
        installation.patch(kind, pattern.format(SESSION), edit)


@pytest.mark.parametrize(
    "disturbance",
    [
        kill_the_worker,
        delete_the_pod_without_grace,
        delete_the_pod,
        kill_an_api_server,
        kill_all_api_servers,
        roll_the_api_servers,
        suspend_and_resume,
        change_the_slots,
        delete_every_child,
        edit_every_child,
    ],
)
def test_the_final_weights_are_those_of_an_undisturbed_run(
    disturbance: Callable[[Installation], None], installation: Installation, run: Run, undisturbed: Ending
) -> None:
    ending = run(lambda: disturbance(installation))
    assert ending.ran_each_step_once()
    assert ending == undisturbed


def test_workers_keep_running_without_an_operator(installation: Installation, run: Run, undisturbed: Ending) -> None:
    operator = f"deployment/{installation.release}-operator"

    def lose_operator_and_worker() -> None:
        installation.kubectl("scale", operator, "--replicas=0")
        gone = ("--for=delete", "--timeout=300s")
        installation.kubectl("wait", "pod", "-l", "app.kubernetes.io/component=operator", *gone)
        kill_the_worker(installation)

    try:
        assert run(lose_operator_and_worker) == undisturbed
    finally:
        installation.kubectl("scale", operator, f"--replicas={OPERATORS}")
        installation.kubectl("rollout", "status", operator, "--timeout=300s")
    installation.wait_ready(SESSION)
