"""The server's reading of SamplerPools and endpoints, and its message for a pool that cannot sample."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from support.server.operator_stand_in import spec_of
from tinsmith_server.fleet.kubernetes.sampler_pool import Pool, Slice, endpoints_of, parse_pool, parse_slice


def pool(*, deleted: bool = False, ready: bool | None = None, message: str = "", **spec: Any) -> Pool:
    metadata = {"name": "fast", "namespace": "team", "uid": "uid-1"}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    said = [] if ready is None else [{"type": "Ready", "status": str(ready), "message": message}]
    return parse_pool({"metadata": metadata, "spec": spec_of(**spec), "status": {"conditions": said}})


@pytest.mark.parametrize(
    ("example", "sentence"),
    [
        (pool(), "SamplerPool team/fast is not ready: its operator has not reconciled it yet"),
        (pool(ready=False, message="A model is loaded."), "SamplerPool team/fast is not ready: A model is loaded"),
        (pool(replicas=0, ready=False), "kubectl --namespace team scale samplerpool fast --replicas 1"),
        (pool(deleted=True, replicas=0), "SamplerPool team/fast is being deleted"),
        (pool(ready=True), "is ready; waiting for the connections to its replicas"),
    ],
)
def test_a_pool_that_does_not_sample_says_what_is_in_the_way(example: Pool, sentence: str) -> None:
    assert sentence in example.not_sampling_reason()


def test_fields_of_a_newer_operator_are_passed_over_and_defaults_are_the_resources() -> None:
    read = pool(engine="builtin", newer={"field": 1})
    assert (read.model, read.replicas, read.max_rank) == ("org/tiny", 1, 128)
    with pytest.raises(ValidationError):
        parse_pool({"metadata": {"name": "fast", "namespace": "team", "uid": "u"}, "spec": {}})


def endpoint(uid: str, address: str, **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": uid, "uid": uid}}


def endpoint_slice(*endpoints: dict[str, Any], family: str = "IPv4", **fields: Any) -> Slice:
    metadata = {"name": "fast-sampler-x", "namespace": "team", "labels": {"tinsmith.dev/pool": "fast"}}
    ports = [{"name": "health", "port": 7080}, {"name": "rpc", "port": 7443}]
    content = {"metadata": metadata, "addressType": family, "endpoints": list(endpoints), "ports": ports}
    return parse_slice({**content, **fields})


@pytest.mark.parametrize(
    ("conditions", "at_work"),
    [
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": True, "serving": False, "terminating": False}, False),
        ({"ready": True, "serving": True, "terminating": True}, False),
        ({"ready": True}, True),
        ({"ready": False}, False),
        ({}, True),
    ],
)
def test_a_pod_gets_work_only_while_it_serves(conditions: dict[str, bool], at_work: bool) -> None:
    (read,) = endpoint_slice(endpoint("a", "10.0.0.1", **conditions)).endpoints
    assert read.at_work is at_work


def test_an_address_of_either_family_has_the_form_of_grpc() -> None:
    (four,) = endpoint_slice(endpoint("a", "10.0.0.1")).endpoints
    (six,) = endpoint_slice(endpoint("a", "fd00::1"), family="IPv6").endpoints
    assert (four.target, six.target) == ("10.0.0.1:7443", "[fd00::1]:7443")


def test_a_pod_of_two_families_is_one_replica() -> None:
    slices = [endpoint_slice(endpoint("a", "10.0.0.1")), endpoint_slice(endpoint("a", "fd00::1"), family="IPv6")]
    for order in (slices, slices[::-1]):
        assert [one.address for one in endpoints_of(order, ("team", "fast")).values()] == ["10.0.0.1"]
    assert endpoints_of(slices, ("other", "fast")) == {}


@pytest.mark.parametrize("fields", [{"endpoints": None}, {"ports": None}, {"ports": [{"name": "health", "port": 1}]}])
def test_a_slice_without_pods_or_without_the_port_is_empty(fields: dict[str, Any]) -> None:
    assert endpoint_slice(endpoint("a", "10.0.0.1"), **fields).endpoints == ()
