"""A session whose model comes from a hub, by a token in a Secret: it names the fault, and serves once it is repaired.

The hub is a mirror on a port of its own, so workers reach it by an additional policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.node.conftest import MODEL, wait_gone
from support.client import tiny_hub
from support.client.sdk import QUESTION, adam, exact_logprobs, next_token_datum
from support.kubernetes.installation import Installation, Object, wait_for

NAME = "from-hub"
BASE_MODEL = "demo/from-hub"
REPOSITORY = "demo/private"
HUB, PORT = "test-hub", 8080
TOKEN = "hf_of_an_account_that_may_read_it"


@pytest.fixture(scope="module")
def hub(installation: Installation) -> Iterator[Installation]:
    """Return a namespace with a hub that serves the tiny model as a private repository."""
    for manifest in hub_manifests():
        installation.apply(manifest)
    installation.kubectl("wait", f"pod/{HUB}", "--for=condition=Ready", "--timeout=120s")
    yield installation
    installation.kubectl(
        "delete", "pod,service,configmap,secret,networkpolicy", "--selector=app=test-hub", "--grace-period=1"
    )


@pytest.fixture(autouse=True)
def no_session(hub: Installation) -> Iterator[None]:
    """Afterwards, and no volume of one."""
    yield
    hub.kubectl("delete", "trainingsession", NAME, "--ignore-not-found")
    wait_gone(hub, "pod", f"{NAME}-0")
    hub.kubectl("delete", "persistentvolumeclaim", f"{NAME}-journal", "--ignore-not-found")


def reason_with(hub: Installation, words: str) -> str:
    """Return the message of ModelNotFound with these words. Earlier, the node may not know the hub's Service."""

    def message() -> str | None:
        said = hub.wait_reason(NAME, "ModelNotFound")
        return said if words in said else None

    return wait_for(message, 300, lambda: str(hub.condition(NAME)))


def test_a_token_that_is_refused_is_named_and_with_the_right_one_the_model_comes(hub: Installation) -> None:
    """Without a word to the session: the kubelet starts the worker again, with the Secret of now."""
    hub.apply(secret("hf_of_nobody"))
    hub.apply(session(REPOSITORY))
    message = reason_with(hub, f"refused the token for {REPOSITORY}")
    assert "hub.tokenSecretRef" in message

    hub.apply(secret(TOKEN))
    hub.wait_ready(NAME)
    data = [next_token_datum(QUESTION)]
    with hub.service_client() as service:
        from_hub = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result()
        from_volume = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
        of_both = []
        for model in (from_hub, from_volume):
            model.forward_backward(data, "cross_entropy").result()
            model.optim_step(adam()).result()
            of_both.append(exact_logprobs(model.forward(data, "cross_entropy").result()))
    assert of_both[0] == of_both[1]


def test_a_repository_that_is_not_there_is_named(hub: Installation) -> None:
    hub.apply(secret(TOKEN))
    hub.apply(session("demo/no-such-repository"))
    reason_with(hub, "no visible model repository demo/no-such-repository")


def session(repository: str) -> Object:
    source = {"repository": repository, "tokenSecretRef": {"name": HUB, "key": "used"}}
    return {
        "apiVersion": "tinsmith.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"name": BASE_MODEL, "source": {"type": "Hub", "hub": source}},
            "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
            "storage": {"size": "1Gi"},
            "pod": {"env": [{"name": "HF_ENDPOINT", "value": f"http://{HUB}:{PORT}"}]},
        },
    }


def secret(used: str) -> Object:
    """Write the token that the hub takes, and the one that the session uses."""
    return {**metadata("v1", "Secret"), "stringData": {"right": TOKEN, "used": used}}


def hub_manifests() -> list[Object]:
    program = Path(tiny_hub.__file__)
    ports = [{"port": PORT, "targetPort": PORT}]
    return [
        secret(TOKEN),
        {**metadata("v1", "ConfigMap"), "data": {program.name: program.read_text()}},
        {**metadata("v1", "Service"), "spec": {"selector": {"app": HUB}, "ports": ports}},
        {**metadata("v1", "Pod"), "spec": hub_pod(program.name)},
        {**metadata("networking.k8s.io/v1", "NetworkPolicy"), "spec": to_the_hub()},
    ]


def to_the_hub() -> Object:
    """Allow workers to reach the hub, in addition to their own policy."""
    peer = {"podSelector": {"matchLabels": {"app": HUB}}}
    return {
        "podSelector": {"matchLabels": {"app.kubernetes.io/managed-by": "tinsmith-operator"}},
        "policyTypes": ["Egress"],
        "egress": [{"to": [peer], "ports": [{"port": PORT}]}],
    }


def hub_pod(program: str) -> Object:
    user = {"runAsNonRoot": True, "runAsUser": 65532, "fsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "hub",
        "image": "tinsmith.local/tinsmith/trainer:0.1.0",
        "command": ["python3", f"/hub/{program}", REPOSITORY, f"/models/{MODEL}", str(PORT)],
        "env": [{"name": "HUB_TOKEN", "valueFrom": {"secretKeyRef": {"name": HUB, "key": "right"}}}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "program", "mountPath": "/hub"}, {"name": "models", "mountPath": "/models"}],
    }
    volumes = [
        {"name": "program", "configMap": {"name": HUB}},
        {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
    ]
    return {"securityContext": user, "containers": [container], "volumes": volumes}


def metadata(api_version: str, kind: str) -> Object:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": HUB, "labels": {"app": HUB}}}
