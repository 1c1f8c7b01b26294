"""The API server's validation of a SamplerPool, and its messages.

What pools and sessions share has one form (tests/unit/operator/api/test_crd.py), and is tested with sessions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.crd.conftest import Manifest, assert_taken
from support.kubernetes.api_server import ApiNamespace
from support.operator.built_pools import BUILT_POOLS, EVERYTHING_OF_A_POOL, VLLM
from support.operator.resources import FROM_HUB, ON_CLAIM
from testcluster.errors import ClusterError
from tinsmith_operator.api.names import API_VERSION, POOL_KIND
from tinsmith_operator.api.sampler_pool import SamplerPoolSpec

SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}


def pool(name: str = "qwen", *, source: Manifest = ON_CLAIM, model: str = "Qwen/Qwen3-8B", **spec: Any) -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": POOL_KIND,
        "metadata": {"name": name},
        "spec": {"model": {"name": model, "source": source}, **spec},
    }


GOOD = {
    "the least": pool(),
    "everything": pool(**EVERYTHING_OF_A_POOL),
    "from the hub": pool(source=FROM_HUB),
    "vLLM": pool(**VLLM),
    "SGLang, with words for it": pool(
        **VLLM | {"engine": "sglang", "serverArguments": ["--mem-fraction-static", "0.8"]}
    ),
    "no replicas": pool(replicas=0),
    "the longest name": pool("a" * 52),
}

BAD = {
    "a long name": (pool("a" * 53), "at most 52 characters"),
    "a name with a dot": (pool("a.b"), "lower-case letters, digits and '-'"),
    "a model with a colon": (pool(model="a:b"), "must not contain ';', white space or ':'"),
    "no source": (pool(source={"type": "Hub"}), "source.hub is required if type is Hub"),
    "the engine of sessions": (pool(engine="peft"), 'supported values: "builtin", "vllm", "sglang"'),
    "vLLM without a GPU": (pool(**VLLM | {"resources": {}}), "request nvidia.com/gpu in spec.resources.limits"),
    "a part of a GPU": (pool(**VLLM | {"resources": {"limits": {"nvidia.com/gpu": "500m"}}}), "whole NVIDIA GPUs"),
    "no GPU in words": (pool(**VLLM | {"resources": {"limits": {"nvidia.com/gpu": 0}}}), "whole NVIDIA GPUs"),
    "vLLM in an image without it": (pool(**VLLM | {"pod": {}}), "name one in spec.pod.image"),
    "words for no server": (pool(serverArguments=["--seed", "1"]), "only for engines vllm and sglang; remove it"),
    "a port of its own": (pool(**VLLM, serverArguments=["--port=80"]), "the sampler itself sets"),
    "a part of a port's name": (pool(**VLLM, serverArguments=["--po", "80"]), "the sampler itself sets"),
    "a host in another spelling": (pool(**VLLM, serverArguments=["--hos=0"]), "the sampler itself sets"),
    "a path with underscores": (
        pool(**VLLM, serverArguments=["--model_path=x"]),
        "the sampler itself sets",
    ),
    "a file of words": (pool(**VLLM, serverArguments=["--config=x"]), "the sampler itself sets"),
    "a socket of its own": (pool(**VLLM, serverArguments=["--uds", "/x"]), "the sampler itself sets"),
    "a model of its own": (pool(**VLLM, serverArguments=["--model", "x"]), "the sampler itself sets"),
    "fewer than no replicas": (pool(replicas=-1), "greater than or equal to 0"),
    "too many replicas": (pool(replicas=1001), "less than or equal to 1000"),
    "no adapters": (pool(adapters={"maxLoaded": 0}), "greater than or equal to 1"),
    "too high a rank": (pool(adapters={"maxRank": 513}), "less than or equal to 512"),
    "the slots of sessions": (pool(adapters={"slots": 8}), 'unknown field "spec.adapters.slots"'),
    "a volume": (pool(storage={"size": "10Gi"}), 'unknown field "spec.storage"'),
    "a spread without a key": (
        pool(pod={"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]}),
        "topologyKey: Required value",
    ),
    "a spread with a selector": (
        pool(pod={"topologySpreadConstraints": [{**SPREAD, "labelSelector": {}}]}),
        'unknown field "spec.pod.topologySpreadConstraints.*labelSelector"',
    ),
    "domains that do not matter": (
        pool(pod={"topologySpreadConstraints": [{**SPREAD, "minDomains": 2}]}),
        "has no effect with ScheduleAnyway",
    ),
    "a label of ours": (pool(pod={"labels": {"tinsmith.dev/pool": "x"}}), "reserved for the operator"),
    "no time to finish": (pool(pod={"terminationGracePeriodSeconds": 1}), "greater than or equal to 30"),
}


@pytest.mark.parametrize("manifest", GOOD.values(), ids=GOOD)
def test_a_valid_pool_is_accepted(manifest: Manifest, api: ApiNamespace) -> None:
    kept = api.would_create(manifest)
    # The one default that the model does not have (tests/unit/operator/api/test_crd.py).
    adapters = {"maxRank": 128, **manifest["spec"].get("adapters", {})}
    wanted = SamplerPoolSpec.model_validate({**manifest["spec"], "adapters": adapters})
    assert SamplerPoolSpec.model_validate(kept["spec"]) == wanted


@pytest.mark.parametrize(("manifest", "says"), BAD.values(), ids=BAD)
def test_a_bad_pool_is_refused_with_a_sentence(manifest: Manifest, says: str, api: ApiNamespace) -> None:
    with pytest.raises(ClusterError) as refused:
        api.would_create(manifest)
    assert re.search(says, str(refused.value))


@pytest.mark.parametrize("spec", [{}, {"replicas": None}], ids=["nothing", "null"])
def test_the_api_server_fills_in_the_defaults_of_a_pool(spec: Manifest, api: ApiNamespace) -> None:
    kept = api.would_create(pool(**spec))["spec"]
    assert (kept["replicas"], kept["engine"], kept["adapters"]) == (1, "builtin", {"maxLoaded": 64, "maxRank": 128})


CHANGES = {
    "the engine": ({"engine": "vllm"}, "create another pool for another engine"),
    "the model": ({"model": {"name": "another"}}, "create another pool for another model"),
    "the model's source": (
        {"model": {"source": {"persistentVolumeClaim": {"path": "elsewhere"}}}},
        "create another pool for another model",
    ),
}

FREE_CHANGES = {
    "the replicas": {"replicas": 5},
    "the adapters": {"adapters": {"maxLoaded": 4, "maxRank": 16}},
    "the length": {"maxSequenceLength": 4096},
    "the length, taken away": {"maxSequenceLength": None},
    "the resources": {"resources": {"limits": {"memory": "48Gi"}}},
    "everything said of the pods": {"pod": None},
}


@pytest.fixture
def stored_pool(api: ApiNamespace) -> Iterator[Manifest]:
    """Return a pool of which one replica is ready."""
    with api.holding(pool(**EVERYTHING_OF_A_POOL)) as stored:
        api.merge(stored, {"status": {"readyReplicas": 1}}, subresource="status")
        yield stored


ON_GPUS = {"engine": "vllm", "pod": {"image": "vllm:1"}, "resources": {"limits": {"nvidia.com/gpu": 1}}}


@pytest.mark.parametrize("status", [{}, {"readyReplicas": 0}], ids=["no status yet", "no replica is ready"])
@pytest.mark.parametrize("change", [ON_GPUS, {"model": {"name": "another"}}], ids=str)
def test_a_mistake_in_a_pool_that_does_not_serve_can_be_corrected(
    change: Manifest, status: Manifest, api: ApiNamespace
) -> None:
    with api.holding(pool(**EVERYTHING_OF_A_POOL)) as stored:
        if status:
            api.merge(stored, {"status": status}, subresource="status")
        api.merge(stored, {"spec": change})


@pytest.mark.parametrize(("spec", "says"), CHANGES.values(), ids=CHANGES)
def test_an_immutable_field_of_a_pool_is_refused_with_the_reason(
    spec: Manifest, says: str, stored_pool: Manifest, api: ApiNamespace
) -> None:
    with pytest.raises(ClusterError, match=says):
        api.merge(stored_pool, {"spec": spec})


@pytest.mark.parametrize("spec", FREE_CHANGES.values(), ids=FREE_CHANGES)
def test_a_mutable_field_of_a_pool_can_be_changed(spec: Manifest, stored_pool: Manifest, api: ApiNamespace) -> None:
    api.merge(stored_pool, {"spec": spec})


@pytest.mark.parametrize("name", BUILT_POOLS)
def test_objects_built_for_a_pool_are_accepted(name: str, api: ApiNamespace) -> None:
    assert_taken(api, BUILT_POOLS[name].objects())
