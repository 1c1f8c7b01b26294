"""The objects of a pool: a Deployment of samplers, and its Service, policy and budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.operator.built_pools import BUILT_POOLS, EVERYTHING_OF_A_POOL, REMOTE, BuiltPool
from support.operator.resources import INSTALLATION, make_pool, make_session
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.build.deployment import build_sampler_template, sampler_inputs
from tinsmith_operator.build.network import build_pool_policy, build_service, build_session_policy


def template_of(built: BuiltPool) -> Manifest:
    return build_sampler_template(built.pool, built.installation, built.restart)


def test_a_pool_and_a_session_of_one_name_share_no_name() -> None:
    pool, session = BUILT_POOLS["pool-minimal"], make_session()
    names = {(each["kind"], each["metadata"]["name"]) for each in pool.objects()}
    session_objects = {("Service", session.name), ("NetworkPolicy", session.name), ("Secret", f"{session.name}-tls")}
    assert not names & session_objects
    assert build_service(pool.pool)["spec"]["selector"] != build_service(session)["spec"]["selector"]


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
def test_every_field_of_the_pod_changes_the_template(field: str) -> None:
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
def test_installation_settings_of_samplers_restart_no_sampler(changes: dict[str, Any]) -> None:
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
