"""What a pool becomes: a Deployment of samplers and what is beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.operator.built_pools import BUILT_POOLS, EVERYTHING_OF_A_POOL, REMOTE, VLLM, BuiltPool
from support.operator.resources import FROM_HUB, INSTALLATION, make_pool, make_session
from tinsmith_operator.api.base import Manifest, parse_quantity
from tinsmith_operator.api.names import POOL_LABEL
from tinsmith_operator.build.deployment import build_deployment, build_sampler_template, sampler_inputs
from tinsmith_operator.build.network import build_policy, build_pool_policy, build_service, build_session_policy
from tinsmith_trainer.options import parse_options

EACH = pytest.mark.parametrize("built", BUILT_POOLS.values(), ids=BUILT_POOLS)


def template_of(built: BuiltPool) -> Manifest:
    return build_sampler_template(built.pool, built.installation, built.restart)


@EACH
def test_a_samplers_pod_keeps_to_the_restricted_standard(built: BuiltPool) -> None:
    spec = template_of(built)["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False


@EACH
def test_a_sampler_has_no_journal(built: BuiltPool) -> None:
    spec = template_of(built)["spec"]
    assert "journal" not in {volume["name"] for volume in spec["volumes"]}
    [arguments] = [container["args"] for container in spec["containers"]]
    assert "--role=sampler" in arguments
    # Both are refused by a sampler.
    assert not [each for each in arguments if each.startswith(("--volume", "--image"))]


@EACH
def test_everything_of_a_pool_belongs_to_it_and_bears_its_label(built: BuiltPool) -> None:
    for manifest in built.objects():
        [owner] = manifest["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("SamplerPool", "pool-uid", True)
        # EndpointSlices inherit the Service's labels: by this one the API server finds them.
        assert manifest["metadata"]["labels"][POOL_LABEL] == "qwen"


def test_a_pool_and_a_session_of_one_name_share_no_name() -> None:
    pool, session = BUILT_POOLS["pool-minimal"], make_session()
    names = {(each["kind"], each["metadata"]["name"]) for each in pool.objects()}
    theirs = {("Service", session.name), ("NetworkPolicy", session.name), ("Secret", f"{session.name}-tls")}
    assert not names & theirs
    assert build_service(pool.pool)["spec"]["selector"] != build_service(session)["spec"]["selector"]


def test_a_new_sampler_is_ready_before_an_old_one_goes() -> None:
    strategy = build_deployment(make_pool(), 1, {})["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def test_a_spread_is_about_the_pods_of_this_pool() -> None:
    spec = template_of(BUILT_POOLS["pool-full"])["spec"]
    selectors = [constraint["labelSelector"]["matchLabels"] for constraint in spec["topologySpreadConstraints"]]
    assert selectors == [{"app.kubernetes.io/name": "tinsmith-sampler", "tinsmith.dev/pool": "qwen"}] * 2


def test_the_loading_of_a_large_model_is_not_taken_for_a_failed_roll() -> None:
    pool = make_pool(pod={"startupTimeoutSeconds": 7200})
    assert build_deployment(pool, 1, {})["spec"]["progressDeadlineSeconds"] > 7200


def test_a_sampler_reaches_what_its_worker_would() -> None:
    pool, session = make_pool(source=FROM_HUB), make_session(source=FROM_HUB)
    *outside, workers = build_pool_policy(pool, REMOTE)["spec"]["egress"]
    assert outside == build_policy(session, REMOTE)["spec"]["egress"]
    assert build_pool_policy(make_pool(), INSTALLATION)["spec"]["egress"] == [workers]


def test_a_sampler_reaches_the_workers_of_its_namespace_and_workers_reach_no_sampler() -> None:
    pool, session = BUILT_POOLS["pool-minimal"], make_session()
    [rule] = build_pool_policy(pool.pool, INSTALLATION)["spec"]["egress"]
    [peer] = rule["to"]
    assert peer["podSelector"]["matchLabels"].items() <= build_service(session)["spec"]["selector"].items()
    assert "namespaceSelector" not in peer
    assert [port["port"] for port in rule["ports"]] == [7443]
    *_, samplers = build_session_policy(session, INSTALLATION)["spec"]["ingress"]
    [peer] = samplers["from"]
    own = template_of(pool)["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= own.items()
    assert build_session_policy(session, INSTALLATION)["spec"]["egress"] == []


@pytest.mark.parametrize("field", sorted(EVERYTHING_OF_A_POOL["pod"]))
def test_whatever_is_said_of_a_pod_changes_it(field: str) -> None:
    said = make_pool(pod={field: EVERYTHING_OF_A_POOL["pod"][field]})
    plain, changed = (build_sampler_template(pool, INSTALLATION, None) for pool in (make_pool(), said))
    # The hash changes in any case, and is no effect.
    for template in (plain, changed):
        del template["metadata"]["annotations"]["tinsmith.dev/inputs"]
    assert plain != changed
    assert sampler_inputs(said, INSTALLATION, None) != sampler_inputs(make_pool(), INSTALLATION, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer_image": "tinsmith.local/tinsmith/trainer:2"},
        {"trainer_image_pull_policy": "Always"},
        {"hang_timeout_seconds": 1.0},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_the_installation_starts_samplers_with_rolls_none(changes: dict[str, Any]) -> None:
    changed = replace(INSTALLATION, **changes)
    assert sampler_inputs(make_pool(), changed, None) == sampler_inputs(make_pool(), INSTALLATION, None)


def test_another_checkpoint_root_rolls_the_samplers() -> None:
    assert sampler_inputs(make_pool(), REMOTE, None) != sampler_inputs(make_pool(), INSTALLATION, None)


def test_the_number_of_replicas_rolls_none() -> None:
    one, three = make_pool(replicas=1), make_pool(replicas=3)
    assert sampler_inputs(one, INSTALLATION, None) == sampler_inputs(three, INSTALLATION, None)


def test_defaults_are_in_no_hash_since_a_newer_operator_may_have_more_fields() -> None:
    spelled_out = make_pool(adapters={"maxLoaded": 64, "maxRank": 64}, pod={"terminationGracePeriodSeconds": 600})
    assert sampler_inputs(spelled_out, INSTALLATION, None) == sampler_inputs(make_pool(), INSTALLATION, None)


# --- engines with a server


def container_of(**spec: Any) -> Manifest:
    [container] = build_sampler_template(make_pool(**spec), INSTALLATION, None)["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def test_a_server_is_split_over_the_gpus_of_its_replica_and_told_the_users_words_in_order() -> None:
    words = ["--gpu-memory-utilization", "0.8", "$(HOME)"]
    arguments = container_of(**VLLM, serverArguments=words)["args"]
    assert [word for word in arguments if word.startswith(("--engine", "--gpus"))] == ["--engine=vllm", "--gpus=2"]
    said = [word.partition("=")[2] for word in arguments if word.startswith("--server-argument=")]
    assert said == ["--gpu-memory-utilization", "0.8", "$$(HOME)"]


def test_the_flags_of_a_server_are_flags_of_the_sampler() -> None:
    options = parse_options(container_of(**VLLM, serverArguments=["--seed", "1"])["args"])
    assert (options.engine, options.gpus, options.server_argument) == ("vllm", 2, ["--seed", "1"])
    assert options.server_start_timeout_seconds == 1800


def test_a_sampler_has_the_time_to_start_its_server_that_the_pod_has() -> None:
    pod = {**VLLM["pod"], "startupTimeoutSeconds": 7200}
    assert "--server-start-timeout-seconds=7200" in container_of(**VLLM | {"pod": pod})["args"]


@pytest.mark.parametrize(("said", "limit"), [(None, str(16 * 2**30)), ("2Gi", str(2 * 2**30))], ids=["unsaid", "said"])
def test_a_server_has_shared_memory_once(said: str | None, limit: str) -> None:
    pod = VLLM["pod"] if said is None else {**VLLM["pod"], "sharedMemory": said}
    spec = build_sampler_template(make_pool(**VLLM | {"pod": pod}), INSTALLATION, None)["spec"]
    [shared] = [volume for volume in spec["volumes"] if volume["name"] == "shared-memory"]
    assert shared["emptyDir"]["medium"] == "Memory"
    assert parse_quantity(shared["emptyDir"]["sizeLimit"]) == parse_quantity(limit)
    paths = [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]]
    assert len(paths) == len(set(paths))
    assert "/var/lib/tinsmith/scratch" in paths


def test_a_user_may_say_otherwise_where_a_server_compiles() -> None:
    own = {"name": "XDG_CACHE_HOME", "value": "/elsewhere"}
    environment = container_of(**VLLM | {"pod": {**VLLM["pod"], "env": [own]}})["env"]
    assert [variable for variable in environment if variable["name"] == "XDG_CACHE_HOME"] == [own]


def test_a_pool_without_a_server_is_told_of_none() -> None:
    arguments = container_of(resources=VLLM["resources"])["args"]
    assert not [word for word in arguments if word.startswith(("--engine", "--gpus", "--scratch", "--server"))]
