from __future__ import annotations

import pytest
from support.operator.resources import FROM_HUB, make_pool, pool_manifest
from tinsmith_operator.api.owner import Unreadable
from tinsmith_operator.api.sampler_pool import parse_pool
from tinsmith_operator.api.serving_spec import SourceType
from tinsmith_operator.api.status import PoolRequests, SamplerPoolStatus


def test_a_pool_reads_as_it_is_written() -> None:
    pool = make_pool(source=FROM_HUB, replicas=0, adapters={"maxLoaded": 3})
    assert (pool.spec.model.source.type, pool.spec.replicas) == (SourceType.HUB, 0)
    assert (pool.spec.adapters.max_loaded, pool.spec.adapters.max_rank) == (3, 64)


def test_names_of_pool_objects_differ_from_names_of_session_objects() -> None:
    assert make_pool().workload_name == "qwen-sampler"


def test_fields_of_a_newer_crd_are_left_alone_in_a_pool() -> None:
    assert make_pool(prefill={"separate": True}).spec.replicas == 1


def test_an_unreadable_pool_is_named_with_its_field() -> None:
    with pytest.raises(Unreadable, match=r"SamplerPool research/qwen cannot be read: engine: .* Install the CRD"):
        parse_pool(pool_manifest(engine="another"))


def test_the_numbers_of_a_pools_status_are_written_also_when_they_are_zero() -> None:
    written = SamplerPoolStatus(observed_generation=3, requests=PoolRequests(restart="2026-01-31T12:00:00Z"))
    manifest = written.to_manifest()
    assert (manifest["replicas"], manifest["readyReplicas"], manifest["updatedReplicas"]) == (0, 0, 0)
    assert SamplerPoolStatus.model_validate(manifest) == written
