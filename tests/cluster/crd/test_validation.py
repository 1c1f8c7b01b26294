"""The API server's validation of a TrainingSession, and its messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from cluster.crd.conftest import Manifest, assert_taken
from support.kubernetes.api_server import ApiNamespace
from support.kubernetes.crds import CRD_FILE
from support.kubernetes.fixtures import Cluster
from support.operator.built_sessions import BUILT, EVERYTHING
from support.operator.resources import FROM_HUB, ON_CLAIM
from testcluster.addons.kuberay import install_kuberay_kinds
from testcluster.errors import ClusterError
from tinsmith_operator.api.names import API_VERSION, SESSION_KIND
from tinsmith_operator.api.training_session import TrainingSessionSpec


def session(name: str = "qwen", *, source: Manifest = ON_CLAIM, model: str = "Qwen/Qwen3-8B", **spec: Any) -> Manifest:
    return {
        "apiVersion": API_VERSION,
        "kind": SESSION_KIND,
        "metadata": {"name": name},
        "spec": {"model": {"name": model, "source": source}, **spec},
    }


def on_path(path: str) -> Manifest:
    return {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "models", "path": path}}


def hub(repository: str) -> Manifest:
    return {"type": "Hub", "hub": {"repository": repository}}


def hub_with(secret: str) -> Manifest:
    return {"type": "Hub", "hub": {"repository": "a/b", "tokenSecretRef": {"name": secret, "key": "key"}}}


def on_claim(name: str) -> Manifest:
    return {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": name}}


def secret_variable(secret: str) -> Manifest:
    return {"name": "A", "valueFrom": {"secretKeyRef": {"name": secret, "key": "k"}}}


NEMO_RL: Manifest = {"engine": "nemo-rl", "pod": {"image": "tinsmith/trainer-nemo-rl:0.1.0"}}
MILES: Manifest = {"engine": "miles", "pod": {"image": "tinsmith/trainer-miles:0.1.0"}}
MILES_ON_GPUS: Manifest = {**MILES, "sampling": "None"}
NEMO_RL_ON_GPUS: Manifest = {**NEMO_RL, "sampling": "None"}


def gpus(count: int | str, resource: str = "nvidia.com/gpu") -> Manifest:
    return {"limits": {resource: count}}


GOOD = {
    "the least": session(),
    "everything": session(**EVERYTHING),
    "from the hub": session(source=FROM_HUB),
    "numbers as quantities": session(resources={"requests": {"cpu": 2}}, storage={"size": 10737418240}),
    "the longest name": session("a" * 52),
    "a path of several folders": session(source=on_path("family/..model/v1..2")),
    "as many places as slots": session(adapters={"slots": 4, "modelPlaces": 4}),
    "an existing claim": session(storage={"existingClaim": "mine"}),
    "a colocated sampler with a model on the CPU": session(**NEMO_RL, sampling="Colocated"),
    "a colocated sampler with a whole model on a GPU": session(sampling="Colocated", resources=gpus(1)),
    "a model divided on the CPU": session(**NEMO_RL, parallelism={"tensor": 2}),
    "a model divided over GPUs": session(
        **NEMO_RL_ON_GPUS, parallelism={"tensor": 2, "pipeline": 2, "expert": 2}, resources=gpus(8)
    ),
    "a model divided over nodes": session(
        **NEMO_RL_ON_GPUS, parallelism={"nodes": 2, "tensor": 16}, modelCache={"claimName": "models"}, resources=gpus(8)
    ),
    "a model on the CPUs of nodes": session(**NEMO_RL, parallelism={"nodes": 3}, modelCache={"claimName": "models"}),
    "nodes that read a model by Miles where it lies": session(
        **MILES_ON_GPUS, parallelism={"nodes": 2, "tensor": 8, "pipeline": 2}, resources=gpus(8)
    ),
    "nodes that read by Miles what one downloaded": session(
        **MILES, source=FROM_HUB, parallelism={"nodes": 2}, modelCache={"claimName": "models"}
    ),
    "exact numerics of Miles on GPUs": session(**MILES_ON_GPUS, resources=gpus(8), numerics="exact"),
    "GPUs and no word on how they divide": session(**NEMO_RL_ON_GPUS, resources=gpus(8)),
    "unusual names of a model": session(model="org/Model_v1.0+beta@2026"),
    "a name with a context length": session(model="Qwen/Qwen3.6-35B-A3B:peft:262144"),
}

BAD = {
    "a long name": (session("a" * 53), "at most 52 characters"),
    "a name with a dot": (session("a.b"), "lower-case letters, digits and '-'"),
    "a name that begins with a digit": (session("1a"), "begin with a letter"),
    "a model with a colon": (session(model="a:b"), "must not contain ';', white space or ':'"),
    "a model with a semicolon": (session(model="a;b"), "must not contain ';', white space or ':'"),
    "a model with another suffix": (session(model="a:peft:x"), "must not contain ';', white space or ':'"),
    "a model with a space": (session(model="a b"), "must not contain ';', white space or ':'"),
    "no model's name": (session(model=""), "spec.model.name"),
    "an absolute path": (session(source=on_path("/models")), "relative to the root of the volume"),
    "a path that climbs": (session(source=on_path("a/../../b")), "or contain '..'"),
    "two sources": (session(source={**ON_CLAIM, "hub": {"repository": "a/b"}}), "source.hub is required if"),
    "the other source": (
        session(source={"type": "Hub", "persistentVolumeClaim": {"claimName": "m"}}),
        "not allowed otherwise",
    ),
    "no source": (session(source={"type": "Hub"}), "source.hub is required if type is Hub"),
    "a folder as a repository": (session(source=hub("/models/x")), "must have the form 'owner/name'"),
    "another engine": (session(engine="abacus"), 'supported values: "peft", "nemo-rl", "miles"'),
    "an undivided engine divided": (session(parallelism={}), "spec.parallelism is only for engines nemo-rl and miles"),
    "exact numerics of NeMo RL on GPUs": (
        session(**NEMO_RL_ON_GPUS, resources=gpus(8), numerics="exact"),
        "spec.numerics cannot be exact for engine nemo-rl on GPUs",
    ),
    "a cache for the other engine": (
        session(modelCache={"claimName": "c"}),
        "spec.modelCache is only for engines nemo-rl",
    ),
    "a cache of a model that Miles reads where it lies": (
        session(**MILES, modelCache={"claimName": "c"}),
        "spec.modelCache is for downloaded models",
    ),
    "nodes of which one downloads for Miles": (
        session(**MILES, source=FROM_HUB, parallelism={"nodes": 2}),
        "need spec.modelCache",
    ),
    "sequences shared by Miles": (
        session(**MILES_ON_GPUS, parallelism={"context": 2}, resources=gpus(8)),
        "engine miles divides neither sequences nor experts",
    ),
    "experts shared by Miles": (
        session(**MILES_ON_GPUS, parallelism={"expert": 2}, resources=gpus(8)),
        "create a session with engine nemo-rl",
    ),
    "a colocated sampler with Miles": (session(**MILES, resources=gpus(8)), "leave no GPU memory for a sampler"),
    "Miles without its image": (session(engine="miles"), "engine miles needs spec.pod.image"),
    "GPUs of another maker for Miles": (session(**MILES, resources=gpus(8, "amd.com/gpu")), "whole NVIDIA GPUs"),
    "nodes without a common cache": (session(**NEMO_RL, parallelism={"nodes": 2}), "need spec.modelCache"),
    "an engine without its image": (session(engine="nemo-rl"), "needs spec.pod.image"),
    "GPUs of another maker": (session(**NEMO_RL, resources=gpus(8, "amd.com/gpu")), "whole NVIDIA GPUs"),
    "parts of GPUs": (session(**NEMO_RL, resources=gpus(1, "nvidia.com/mig-1g.10gb")), "whole NVIDIA GPUs"),
    "half a GPU": (session(**NEMO_RL, resources=gpus("500m")), "must be a whole number above zero"),
    "no GPU in words": (session(**NEMO_RL, resources=gpus(0)), "remove it to compute on the CPU"),
    "a colocated sampler with a model on GPUs": (
        session(**NEMO_RL, sampling="Colocated", resources=gpus(8)),
        'set spec.sampling to "None", and sample from a SamplerPool',
    ),
    "no sampling mode for a model on GPUs": (
        session(**NEMO_RL, resources=gpus(8)),
        "leave no GPU memory for a sampler",
    ),
    "sequences shared on the CPU": (session(**NEMO_RL, parallelism={"context": 2}), "without GPUs"),
    "experts shared on the CPU": (session(**NEMO_RL, parallelism={"expert": 2}), "without GPUs"),
    "matrices that GPUs do not divide": (
        session(**NEMO_RL_ON_GPUS, parallelism={"tensor": 3}, resources=gpus(8)),
        "divisible by tensor times pipeline times context",
    ),
    "experts that a stage does not divide": (
        session(**NEMO_RL_ON_GPUS, parallelism={"pipeline": 2, "expert": 8}, resources=gpus("8")),
        "divisible by spec.parallelism.expert",
    ),
    "no slots": (session(adapters={"slots": 0}), "greater than or equal to 1"),
    "fewer places than slots": (
        session(adapters={"slots": 8, "modelPlaces": 7}),
        "must be at least spec.adapters.slots",
    ),
    "fewer places than slots by default": (
        session(adapters={"modelPlaces": 7}),
        "must be at least spec.adapters.slots",
    ),
    "too high a rank": (session(adapters={"maxRank": 513}), "less than or equal to 512"),
    "another number of bits": (session(quantization="3bit"), "Unsupported value"),
    "unknown numerics": (session(numerics="close"), "Unsupported value"),
    "few bits for ranks": (session(**NEMO_RL, quantization="4bit"), "spec.quantization is only for engine peft"),
    "too short a length": (session(maxSequenceLength=15), "greater than or equal to 16"),
    "no quantity": (session(resources={"limits": {"memory": "lots"}}), "must be a quantity that is not negative"),
    "a negative quantity": (session(resources={"requests": {"cpu": "-1"}}), "must be a quantity that is not negative"),
    "no size": (session(storage={"size": "0"}), "must be a quantity of 256Mi or more"),
    "a size in words": (session(storage={"size": "big"}), "must be a quantity of 256Mi or more"),
    "a size that is full at once": (session(storage={"size": "48Mi"}), "64Mi in reserve"),
    "shared memory in words": (session(pod={"sharedMemory": "some"}), "must be a quantity above zero"),
    "a class for an existing claim": (
        session(storage={"existingClaim": "mine", "storageClassName": "fast"}),
        "remove one of the two",
    ),
    "deletion of an existing claim": (
        session(storage={"existingClaim": "mine", "retentionPolicy": {"whenDeleted": "Delete"}}),
        "set spec.storage.retentionPolicy.whenDeleted to Retain",
    ),
    "a label of ours": (session(pod={"labels": {"tinsmith.dev/session": "x"}}), "reserved for the operator"),
    "a label of our application": (session(pod={"labels": {"app.kubernetes.io/name": "x"}}), "use another prefix"),
    "an annotation of ours": (session(pod={"annotations": {"tinsmith.dev/inputs": "x"}}), "reserved for the operator"),
    "a variable of ours": (session(pod={"env": [{"name": "HF_TOKEN", "value": "x"}]}), "use .*tokenSecretRef"),
    "a variable with a dash": (session(pod={"env": [{"name": "A-B"}]}), "letters, digits and '_'"),
    "a variable twice": (session(pod={"env": [{"name": "A"}, {"name": "A"}]}), "Duplicate value"),
    "a variable with two values": (
        session(pod={"env": [{"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}),
        "either value or valueFrom",
    ),
    "a worker's certificate": (
        session(pod={"env": [secret_variable("victim-tls")]}),
        "sessions and pools cannot use Secrets",
    ),
    "the authority's key": (session(pod={"env": [secret_variable("tinsmith-ca")]}), "name another Secret"),
    "Helm's record of the values": (
        session(pod={"env": [secret_variable("sh.helm.release.v1.tinsmith.v1")]}),
        "Secrets of the installation",
    ),
    "the first key for a token": (session(source=hub_with("tinsmith-api-key")), "name another Secret"),
    "a model on the checkpoints": (
        session(source=on_claim("tinsmith-checkpoints")),
        "cannot use claims of the installation",
    ),
    "a journal in the store": (
        session(storage={"existingClaim": "blue-api-server-data"}),
        "cannot use claims of the installation",
    ),
    "a cache on the checkpoints": (
        session(**NEMO_RL, modelCache={"claimName": "tinsmith-checkpoints"}),
        "name another claim",
    ),
    "a variable from nowhere": (session(pod={"env": [{"name": "A", "valueFrom": {}}]}), "exactly one of secretKeyRef"),
    "no time to stop": (session(pod={"terminationGracePeriodSeconds": 1}), "greater than or equal to 30"),
    "an unknown field": (session(colour="blue"), 'unknown field "spec.colour"'),
}


@pytest.mark.parametrize("manifest", GOOD.values(), ids=GOOD)
def test_a_valid_session_is_accepted(manifest: Manifest, api: ApiNamespace) -> None:
    kept = api.would_create(manifest)
    # The one default that the model does not have (tests/unit/operator/api/test_crd.py).
    adapters = {"maxRank": 128, **manifest["spec"].get("adapters", {})}
    wanted = TrainingSessionSpec.model_validate({**manifest["spec"], "adapters": adapters})
    assert TrainingSessionSpec.model_validate(kept["spec"]) == wanted


def test_the_documented_manifest_is_accepted(api: ApiNamespace) -> None:
    page = (CRD_FILE.parents[1] / "docs" / "reference" / "training-session.md").read_text()
    (manifest,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    api.would_create(yaml.safe_load(manifest))


@pytest.mark.parametrize(("manifest", "says"), BAD.values(), ids=BAD)
def test_a_bad_session_is_refused_with_a_sentence(manifest: Manifest, says: str, api: ApiNamespace) -> None:
    with pytest.raises(ClusterError) as refused:
        api.would_create(manifest)
    assert re.search(says, str(refused.value))


def test_a_model_that_miles_never_divides_gets_no_error_about_gpus(api: ApiNamespace) -> None:
    with pytest.raises(ClusterError, match="create a session with engine nemo-rl") as refused:
        api.would_create(session(**MILES, parallelism={"context": 2}))
    assert "nvidia.com/gpu" not in str(refused.value)


def test_the_api_server_fills_in_the_defaults(api: ApiNamespace) -> None:
    kept = api.would_create(session(adapters={}, storage={}))
    assert kept["spec"]["adapters"] == {"slots": 8, "maxRank": 128}
    assert kept["spec"]["storage"]["retentionPolicy"] == {"whenDeleted": "Retain"}


CHANGES = {
    "the model": ({"model": {"name": "another"}}, "create another session for another model"),
    "the model's source": (
        {"model": {"source": {"persistentVolumeClaim": {"path": "elsewhere"}}}},
        "create another session for another model",
    ),
    "the length": ({"maxSequenceLength": 4096}, "create another session for another length"),
    "the bits of weights, added": ({"quantization": "4bit"}, "trained on weights of this precision"),
    "the length, taken away": ({"maxSequenceLength": None}, "changed, added or removed"),
    "the class": ({"storage": {"storageClassName": "slow"}}, "storageClassName cannot be changed"),
    "the class, taken away": ({"storage": {"storageClassName": None}}, "changed, added or removed"),
    "a claim, added": ({"storage": {"existingClaim": "mine"}}, "existingClaim cannot be changed"),
    "the access mode": ({"storage": {"accessMode": "ReadWriteOncePod"}}, "accessMode cannot be changed"),
    "the engine": ({"engine": "nemo-rl"}, "create another session for another engine"),
    "the engine and what divides it": (
        {"engine": "nemo-rl", "parallelism": {"tensor": 2}, "quantization": None},
        "create another session for another engine",
    ),
    "a smaller volume": ({"storage": {"size": "49Gi"}}, "less than status.volumeSize"),
}

FREE_CHANGES: dict[str, Manifest | list[Manifest]] = {
    "the slots": {"adapters": {"slots": 4}},
    "a larger volume": {"storage": {"size": "51Gi"}},
    "the same size in other words": {"storage": {"size": "51200Mi"}},
    "the retention": {"storage": {"retentionPolicy": {"whenDeleted": "Delete"}}},
    "a growth that came to nothing, taken back": [{"storage": {"size": "900Gi"}}, {"storage": {"size": "50Gi"}}],
    "suspend": {"suspend": True},
    "the image": {"pod": {"image": "another:2"}},
    "sampling": {"sampling": "Colocated"},
    "everything said of the pod": {"pod": None},
}


@pytest.fixture
def stored_session(api: ApiNamespace) -> Iterator[Manifest]:
    """Return a session that was ready, and has a volume."""
    with api.holding(session(**EVERYTHING)) as stored:
        api.merge(stored, {"status": WAS_READY}, subresource="status")
        yield stored


WAS_READY = {"firstReadyTime": "2026-01-02T03:04:05Z", "volumeSize": "50Gi"}

CORRECTIONS: dict[str, Manifest] = {
    "the model": {"model": {"name": "another"}},
    "the model's source": {"model": {"source": {"persistentVolumeClaim": {"path": "elsewhere"}}}},
    "the length, taken away": {"maxSequenceLength": None},
    "the bits of weights, added": {"quantization": "4bit"},
    "the class": {"storage": {"storageClassName": "slow"}},
    "the class, taken away": {"storage": {"storageClassName": None}},
    "the access mode": {"storage": {"accessMode": "ReadWriteOncePod"}},
    "a smaller volume": {"storage": {"size": "1Gi"}},
    "the engine": {"engine": "nemo-rl", "pod": {"image": "another:2"}, "parallelism": {"tensor": 2}},
}
"""A session that was never ready and has no volume."""


@pytest.mark.parametrize("spec", CORRECTIONS.values(), ids=CORRECTIONS)
@pytest.mark.parametrize("status", [{}, {"restarts": {"crash": 3}}], ids=["no status yet", "never ready"])
def test_a_mistake_that_never_took_effect_can_be_corrected(spec: Manifest, status: Manifest, api: ApiNamespace) -> None:
    with api.holding(session(**EVERYTHING)) as stored:
        if status:
            api.merge(stored, {"status": status}, subresource="status")
        api.merge(stored, {"spec": spec})


def test_a_claim_that_was_named_by_mistake_can_be_corrected_until_the_session_was_ready(api: ApiNamespace) -> None:
    with api.holding(session(storage={"existingClaim": "mien"})) as stored:
        api.merge(stored, {"spec": {"storage": {"existingClaim": "mine"}}})
        api.merge(stored, {"status": WAS_READY}, subresource="status")
        for claim in ("another", None):
            with pytest.raises(ClusterError, match="existingClaim cannot be changed"):
                api.merge(stored, {"spec": {"storage": {"existingClaim": claim}}})


def test_one_node_never_becomes_several(api: ApiNamespace) -> None:
    with api.holding(session(**NEMO_RL, modelCache={"claimName": "models"})) as stored:
        for nodes in (1, 2):
            change = {"spec": {"parallelism": {"nodes": nodes}}}
            if nodes == 1:
                api.merge(stored, change)
                continue
            with pytest.raises(ClusterError, match="never from one node to several"):
                api.merge(stored, change)


@pytest.mark.parametrize(("spec", "says"), CHANGES.values(), ids=CHANGES)
def test_an_immutable_field_is_refused_with_the_reason(
    spec: Manifest, says: str, stored_session: Manifest, api: ApiNamespace
) -> None:
    with pytest.raises(ClusterError, match=says):
        api.merge(stored_session, {"spec": spec})


@pytest.mark.parametrize("spec", FREE_CHANGES.values(), ids=FREE_CHANGES)
def test_a_mutable_field_can_be_changed(
    spec: Manifest | list[Manifest], stored_session: Manifest, api: ApiNamespace
) -> None:
    for change in spec if isinstance(spec, list) else [spec]:
        api.merge(stored_session, {"spec": change})


def test_a_length_cannot_be_added_later(api: ApiNamespace) -> None:
    with api.holding(session()) as stored:
        api.merge(stored, {"status": WAS_READY}, subresource="status")
        with pytest.raises(ClusterError, match="changed, added or removed"):
            api.merge(stored, {"spec": {"maxSequenceLength": 4096}})


@pytest.fixture(scope="session")
def ray_clusters(api_cluster: Cluster) -> None:
    """Return the cluster with the kind of a session of several nodes."""
    install_kuberay_kinds(api_cluster.kubectl)


@pytest.mark.usefixtures("ray_clusters")
@pytest.mark.parametrize("name", BUILT)
def test_objects_built_for_a_session_are_accepted(name: str, api: ApiNamespace) -> None:
    assert_taken(api, BUILT[name].objects())


@pytest.mark.parametrize("change", [{"tensor": 4}, None], ids=["changed", "taken away"])
def test_how_a_model_is_divided_cannot_be_changed(change: Manifest | None, api: ApiNamespace) -> None:
    with api.holding(session(**NEMO_RL, parallelism={"tensor": 2})) as stored:
        api.merge(stored, {"status": WAS_READY}, subresource="status")
        with pytest.raises(ClusterError, match="changed, added or removed"):
            api.merge(stored, {"spec": {"parallelism": change}})
