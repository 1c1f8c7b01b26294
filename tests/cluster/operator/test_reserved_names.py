"""A session or pool that names what is the installation's own, and was stored all the same: it gets nothing of it."""

from __future__ import annotations

import json
from typing import Any

from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import comes_to_rest, running, session_manifest, settings_for
from tinsmith_operator.kube.resources import CLAIMS, PODS, SESSIONS
from tinsmith_operator.settings import Settings

NAMES = {
    "secrets": ["postgresql"],
    "pullSecrets": ["registry-login"],
    "claims": ["blue-checkpoints", "store-of-ours"],
    "accounts": ["blue-operator"],
}


def an_installation(namespace: str) -> Settings:
    """Return an installation whose name the CRDs do not know by themselves."""
    return settings_for(namespace, release="blue", first_key_secret="blue-api-key", installation_names=NAMES)


def variable(secret: str) -> dict[str, Any]:
    return {"pod": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": secret, "key": "key"}}}]}}


def token(secret: str) -> dict[str, Any]:
    hub = {"repository": "a/b", "tokenSecretRef": {"name": secret, "key": "key"}}
    return {"model": {"name": "demo/tiny", "source": {"type": "Hub", "hub": hub}}}


async def test_a_journal_in_the_installations_store_is_never_written_to(hands: KubectlUser, kubelet: Kubelet) -> None:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    manifest = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "store-of-ours"}}
    await hands.create(CLAIMS, {**manifest, "spec": claim})
    async with running(an_installation(hands.namespace)):
        await hands.create(SESSIONS, session_manifest(storage={"existingClaim": "store-of-ours"}))
        await comes_to_rest(hands, "NameReserved")
        assert await hands.all(PODS) == []
        live = await hands.get(CLAIMS, "store-of-ours")
    assert live is not None
    assert "tinsmith.dev" not in json.dumps(live["metadata"].get("annotations", {}))


async def test_a_session_is_not_called_so_that_its_certificate_would_be_the_api_servers(
    hands: KubectlUser, kubelet: Kubelet
) -> None:
    async with running(an_installation(hands.namespace)):
        await hands.create(SESSIONS, session_manifest("blue-api-server"))
        await comes_to_rest(hands, "NameReserved", name="blue-api-server")
        assert await hands.all(PODS) == []


async def test_images_and_secrets_that_are_not_listed_run_nothing(hands: KubectlUser, kubelet: Kubelet) -> None:
    lists = {"allowed_images": ["registry.example.com/team/*"], "allowed_secrets": ["hub-*"]}
    async with running(settings_for(hands.namespace, **lists)):
        await hands.create(SESSIONS, session_manifest("image", pod={"image": "evil.io/x:1"}))
        await comes_to_rest(hands, "ImageNotAllowed", name="image")
        await hands.create(SESSIONS, session_manifest("secret", **variable("others")))
        await comes_to_rest(hands, "SecretNotAllowed", name="secret")
        assert await hands.all(PODS) == []
        both = {"image": "registry.example.com/team/trainer:1", **variable("hub-token")["pod"]}
        await hands.create(SESSIONS, session_manifest("fine", pod=both))
        await comes_to_rest(hands, "WorkerReady", name="fine")
