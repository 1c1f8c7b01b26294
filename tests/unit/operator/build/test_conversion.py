"""The arguments and mounts of the Job that converts a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.operator.built_sessions import EVERYTHING, NEMO_RL, STORE
from support.operator.resources import FROM_HUB, INSTALLATION, make_session
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.jobs import build_conversion, conversion_digest
from tinsmith_operator.build.network import build_service, build_session_policy
from tinsmith_operator.build.worker import PinnedImage, WorkerPlan
from tinsmith_operator.build.workload import build_workload
from tinsmith_operator.installation import Installation
from tinsmith_trainer.conversion import parse_options

PLAN = WorkerPlan("claim-uid", PinnedImage("image", None), 1)
DIVIDED: Manifest = {
    **NEMO_RL,
    "sampling": "None",
    "parallelism": {"nodes": 2, "tensor": 8},
    "modelCache": {"claimName": "converted"},
    "resources": {
        "requests": {"cpu": 32, "memory": "256Gi"},
        "limits": {"nvidia.com/gpu": 8, "rdma/hca": 1, "memory": "512Gi"},
    },
}


def session(**spec: Any) -> TrainingSession:
    return make_session(**{**DIVIDED, **spec})


def job(installation: Installation = INSTALLATION, **spec: Any) -> Manifest:
    return build_conversion(session(**spec), installation, PLAN)


def pod_of(job: Manifest) -> Manifest:
    template: Manifest = job["spec"]["template"]
    return template


def container_of(template: Manifest) -> Manifest:
    [container] = template["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def arguments(template: Manifest) -> list[str]:
    return [argument.replace("$$", "$") for argument in container_of(template)["args"]]


def worker_of(session: TrainingSession, installation: Installation = INSTALLATION) -> Manifest:
    template: Manifest = build_workload(session, installation, PLAN)["spec"]["headGroupSpec"]["template"]
    return template


@pytest.mark.parametrize("spec", [{}, {"source": FROM_HUB}, {"maxSequenceLength": 4096}], ids=str)
def test_the_program_takes_its_flags_which_are_the_workers(spec: Manifest) -> None:
    told = arguments(pod_of(job(**spec)))
    assert set(told) - set(arguments(worker_of(session(**spec)))) == set()
    options = parse_options(told)
    assert (options.gpus_per_node, options.nodes, options.tensor_parallel) == (8, 2, 8)


def test_a_users_dollars_reach_the_program_as_they_are() -> None:
    source = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "models", "path": "$(HOME)"}}
    assert parse_options(arguments(pod_of(job(source=source)))).model == "/models/$(HOME)"


def test_it_has_the_models_volumes_and_neither_the_journal_nor_certificates_nor_credentials() -> None:
    template = pod_of(job(STORE))
    claims = {volume.get("persistentVolumeClaim", {}).get("claimName") for volume in template["spec"]["volumes"]}
    assert claims - {None} == {"models", "converted"}
    container = container_of(template)
    assert "envFrom" not in container
    assert "AWS_REGION" not in {variable["name"] for variable in container["env"]}
    cache = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "model-cache"]
    worker = container_of(worker_of(session(), STORE))["volumeMounts"]
    assert cache == [mount["mountPath"] for mount in worker if mount["name"] == "model-cache"]


def test_the_pod_fields_of_the_user_apply_to_the_conversion_pod() -> None:
    pod = {**EVERYTHING["pod"], **NEMO_RL["pod"]}
    own, worker = pod_of(job(pod=pod)), worker_of(session(pod=pod))
    assert container_of(own)["env"][-2:] == EVERYTHING["pod"]["env"]
    assert own["metadata"]["labels"]["team"] == "research"
    for field in (
        "nodeSelector",
        "tolerations",
        "affinity",
        "imagePullSecrets",
        "serviceAccountName",
        "securityContext",
    ):
        assert own["spec"][field] == worker["spec"][field]
    assert own["spec"]["automountServiceAccountToken"] is False


def test_neither_the_service_nor_the_workload_selects_the_conversion_pod() -> None:
    own, spec = pod_of(job())["metadata"]["labels"], session().spec
    selectors = [
        build_service(session())["spec"]["selector"],
        build_workload(make_session(**NEMO_RL), INSTALLATION, PLAN)["spec"]["selector"]["matchLabels"],
    ]
    assert spec.is_converted_once
    assert not any(selector.items() <= own.items() for selector in selectors)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_sessions_network_policy_holds_for_it_and_lets_it_reach_the_hub(nodes: int) -> None:
    divided = session(source=FROM_HUB, parallelism={"nodes": nodes})
    spec = build_session_policy(divided, INSTALLATION)["spec"]
    own = pod_of(build_conversion(divided, INSTALLATION, PLAN))["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= own.items()
    assert {"ports": [{"port": 443, "protocol": "TCP"}]} in spec["egress"]


def test_a_drained_node_is_no_try_and_what_would_end_alike_is_not_tried_again() -> None:
    drained, alike = job()["spec"]["podFailurePolicy"]["rules"]
    assert drained["action"] == "Ignore"
    assert drained["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert (alike["action"], alike["onExitCodes"]["values"]) == ("FailJob", [2])


def test_the_longest_name_of_a_session_gives_a_name_that_a_job_may_have() -> None:
    built = build_conversion(make_session("a" * 52, **DIVIDED), INSTALLATION, PLAN)
    assert len(built["metadata"]["name"]) == 63


@pytest.mark.parametrize(
    "change",
    [
        {"source": FROM_HUB},
        {"modelCache": {"claimName": "another"}},
        {"resources": {}},
    ],
    ids=["model", "cache", "no GPUs"],
)
def test_inputs_of_the_result_are_in_its_digest(change: Manifest) -> None:
    assert conversion_digest(session(**change), PLAN) != conversion_digest(session(), PLAN)


def test_another_image_has_another_digest_and_what_that_image_is_found_to_be_has_not() -> None:
    found = replace(PLAN, image=PinnedImage("image", "image@sha256:1f"))
    another = replace(PLAN, image=PinnedImage("another", None))
    assert conversion_digest(session(), found) == conversion_digest(session(), PLAN)
    assert conversion_digest(session(), another) != conversion_digest(session(), PLAN)


@pytest.mark.parametrize(
    "change",
    [{"adapters": {"slots": 4}}, {"parallelism": {"nodes": 4}}, {"pod": {**NEMO_RL["pod"], "labels": {"a": "b"}}}],
)
def test_other_fields_are_not_in_the_digest_of_the_result(change: Manifest) -> None:
    assert conversion_digest(session(**change), PLAN) == conversion_digest(session(), PLAN)
