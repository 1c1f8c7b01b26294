"""KEDA itself scales a pool: from zero for the first sample, up under load, down during samples, and to zero again.

`make test-keda` runs this file, because a first build of KEDA takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
import yaml
from cluster.node.conftest import EXAMPLES, NAMESPACE, SEVERAL, wait_gone
from support.certificates import CLIENT, SERVER, Authority
from support.client.sampling_load import Open, sampling_load, wait_for_more
from support.kubernetes.charts import merged
from support.kubernetes.installation import Installation, Object, wait_for
from testcluster.addons.keda import dns_names, install_keda, keda_images

pytestmark = [pytest.mark.keda, pytest.mark.timeout(1800)]

# No session serves this name, so that the first sample waits for the pool.
MODEL = "demo/pool-only"
POOL = "tiny"


@pytest.fixture
def scaling(installation: Installation, tmp_path: Path) -> Iterator[Installation]:
    """Install KEDA, and open the port for it."""
    for archive in keda_images(tmp_path):
        installation.cluster.load_image(archive)
    authority = Authority()
    leaf = authority.leaf(*dns_names(), usages=(SERVER, CLIENT))
    files = {"tls.crt": leaf.certificate, "tls.key": leaf.key, "ca.crt": authority.certificate}
    install_keda(installation.cluster.kubectl, files)
    values = merged(SEVERAL, {"apiServer": {"autoscaling": {"enabled": True}}})
    Installation(installation.cluster, NAMESPACE, values).install()
    installation.wait_answering()
    yield installation
    installation.install()


def pool_manifest() -> Object:
    manifest: Object = yaml.safe_load((EXAMPLES / "sampler-pool.yaml").read_text())
    manifest["spec"]["model"]["name"] = MODEL
    manifest["spec"]["replicas"] = 0
    manifest["spec"]["resources"]["requests"] = {"cpu": "100m", "memory": "512Mi"}
    return manifest


def scaled_object() -> Object:
    """Return the example with shorter times, and a target that three programs exceed."""
    manifest: Object = yaml.safe_load((EXAMPLES / "sampler-pool-keda.yaml").read_text())
    at_once = {"stabilizationWindowSeconds": 0}
    behavior = {"behavior": {"scaleDown": at_once, "scaleUp": at_once}}
    manifest["spec"] |= {
        "maxReplicaCount": 2,
        "pollingInterval": 5,
        "cooldownPeriod": 5,
        "advanced": {"horizontalPodAutoscalerConfig": behavior},
    }
    return aimed_at(manifest, "1")


def aimed_at(manifest: Object, unfinished_samples: str) -> Object:
    [trigger] = manifest["spec"]["triggers"]
    aimed = {**trigger, "metadata": {**trigger["metadata"], "unfinishedSamples": unfinished_samples}}
    return {**manifest, "spec": {**manifest["spec"], "triggers": [aimed]}}


@contextmanager
def applied(installation: Installation, *manifests: Object) -> Iterator[None]:
    for manifest in manifests:
        installation.apply(manifest)
    try:
        yield
    finally:
        for manifest in reversed(manifests):
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            installation.kubectl("delete", kind, name, "--wait=false")
            wait_gone(installation, kind, name)


def wait_replicas(installation: Installation, count: int, timeout_seconds: float = 300) -> None:
    def settled() -> bool:
        pool = installation.get("samplerpool", POOL) or {}
        status = pool.get("status") or {}
        wanted = pool["spec"]["replicas"], status.get("replicas", 0), status.get("readyReplicas", 0)
        return wanted == (count, count, count)

    def state() -> str:
        scaled = installation.get("scaledobject", POOL)
        return f"{POOL} is not at {count}: {installation.get('samplerpool', POOL)}, {scaled}"

    wait_for(settled, timeout_seconds, state)


def greedy(client: tinker.ServiceClient) -> list[int]:
    sampling = on_pool(client)
    prompt = tinker.ModelInput.from_ints([5, 9, 2, 14])
    parameters = tinker.SamplingParams(max_tokens=8, temperature=0.0)
    return list(sampling.sample(prompt, num_samples=1, sampling_params=parameters).result().sequences[0].tokens)


def on_pool(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model=MODEL).result()


def test_keda_scales_a_pool_from_zero_with_the_load_and_back_to_zero_and_no_sample_fails(scaling: Installation) -> None:
    manifest = scaled_object()
    with applied(scaling, pool_manifest(), manifest), scaling.service_client() as client:
        wait_replicas(scaling, 0)
        first = greedy(client)
        samplers: list[Open] = [on_pool] * 3
        with sampling_load(scaling.connect, samplers) as answers:
            wait_replicas(scaling, 2)
            wait_for_more(answers)
            scaling.apply(aimed_at(manifest, "1000"))
            wait_replicas(scaling, 1)
            wait_for_more(answers)
        assert [of_one.conflicting for of_one in answers] == [set()] * 3
        wait_replicas(scaling, 0)
        assert greedy(client) == first
