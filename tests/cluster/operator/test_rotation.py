"""Another certificate authority takes over on a real API server, with the rights of the chart's service account."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from cryptography import x509
from support.kubernetes.chart_account import grant, kubeconfig_of_the_account, rights_of
from support.kubernetes.fixtures import Cluster
from support.kubernetes.kubectl import KubectlUser, Kubelet
from support.operator.operators import comes_to_rest, eventually, pool_manifest, running, session_manifest, settings_for
from tinsmith_operator.ca.rotation import ROTATE_ANNOTATION, ROTATED_ANNOTATION
from tinsmith_operator.kube.resources import PODS, POOLS, SECRETS, SESSIONS

LEAVES = ("tiny-tls", "tiny-sampler-tls", "tinsmith-api-server-tls")


async def held(hands: KubectlUser, secret: str, name: str) -> list[x509.Certificate]:
    """Return the certificates in that field of the Secret."""
    found = await hands.get(SECRETS, secret)
    text = (found or {}).get("data", {}).get(name)
    return x509.load_pem_x509_certificates(base64.b64decode(text)) if text else []


async def trusted(hands: KubectlUser) -> list[tuple[str, ...]]:
    """Return the trusted serial numbers by each holder of a leaf; its own authority's first."""
    bundles = [await held(hands, secret, "ca.crt") for secret in LEAVES]
    return [tuple(str(each.serial_number) for each in bundle) for bundle in bundles]


@pytest.mark.timeout(300)
async def test_all_pods_trust_the_next_authority_before_it_issues_and_the_last_one_until_its_leaves_are_gone(
    api_cluster: Cluster, hands: KubectlUser, kubelet: Kubelet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant(api_cluster, rights_of(hands.namespace))
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of_the_account(api_cluster, hands.namespace, tmp_path)))
    seen: list[list[tuple[str, ...]]] = []
    # Long enough to be seen on a busy machine: three answers of the API are one look.
    async with running(settings_for(hands.namespace, ca_pause_seconds=2)):
        await hands.create(SESSIONS, session_manifest())
        await hands.create(POOLS, pool_manifest())
        await comes_to_rest(hands, "WorkerReady")
        await eventually(lambda: held(hands, "tiny-sampler-tls", "ca.crt"), "the pool has its certificate")
        [before] = await held(hands, "tinsmith-ca", "tls.crt")
        pod = await hands.get(PODS, "tiny-0")
        seen.append(await trusted(hands))
        await hands.patch(SECRETS, "tinsmith-ca", {"metadata": {"annotations": {ROTATE_ANNOTATION: "2026-02"}}})

        async def is_done() -> bool:
            now = await trusted(hands)
            if not seen or seen[-1] != now:
                seen.append(now)
            [authority] = await held(hands, "tinsmith-ca", "tls.crt")
            return now == [(str(authority.serial_number),)] * len(LEAVES) and authority != before

        await eventually(is_done, "the new authority alone is trusted", seconds=200)
        secret, after = await hands.get(SECRETS, "tinsmith-ca"), await hands.get(PODS, "tiny-0")
        await comes_to_rest(hands, "WorkerReady")
    old, new = seen[0][0][0], seen[-1][0][0]
    whole = [now for now in seen if len(set(now)) == 1]
    assert [now[0] for now in whole] == [(old,), (old, new), (new, old), (new,)]
    assert secret is not None
    assert set(secret["data"]) == {"tls.crt", "tls.key"}
    assert secret["metadata"]["annotations"][ROTATED_ANNOTATION] == "2026-02"
    assert pod is not None
    assert after is not None
    assert after["metadata"]["uid"] == pod["metadata"]["uid"], "a rotation restarts no pod"
