"""Sampler pools under load: whatever happens to their replicas, no program sees more than a slow answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest
import tinker
import yaml
from cluster.node.conftest import EXAMPLES, MODEL, SESSION, Run, wait_gone
from support.client.pipelined_program import Ending
from support.client.sampling_load import Answers, Open, sampling_load, wait_for_more
from support.client.sdk import adam, next_token_datum
from support.kubernetes.installation import API_SERVER, Installation, Object, wait_for
from testcluster.errors import ClusterError

A, B = "tiny-a", "tiny-b"
POOL_LABEL = "tinsmith.dev/pool"
LOST = re.compile(r'^tinsmith_http_requests_total{route="[^"]*/retrieve_future",status="410"} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def pools(installation: Installation) -> Iterator[None]:
    """Return two pools and the session of the examples, each pool with one replica."""
    installation.apply(EXAMPLES / "session.yaml")
    for name in (A, B):
        installation.apply(pool_manifest(name))
    for name in (A, B):
        wait_replicas(installation, name, 1)
    installation.wait_ready(SESSION)
    yield
    for name in (A, B):
        installation.kubectl("delete", "samplerpool", name, "--wait=false")
    for name in (A, B):
        wait_gone(installation, "deployment", f"{name}-sampler")


@pytest.fixture
def saved(installation: Installation) -> str:
    """Return where a model's weights were saved for sampling."""
    with installation.service_client() as client:
        model = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
        model.forward_backward([next_token_datum([5, 9, 2, 14, 7, 11])], "cross_entropy")
        model.optim_step(adam()).result()
        return model.save_weights_for_sampler("load").result().path


def scale_up(installation: Installation) -> None:
    installation.kubectl("scale", "samplerpool", A, "--replicas=2")
    wait_replicas(installation, A, 2)


def kill_a_replica(installation: Installation) -> None:
    [pod] = pods_of(installation, B)
    installation.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
    wait_for(
        lambda: successor_of(pod, installation), 240, lambda: f"no successor of {pod['metadata']['name']} is ready"
    )
    wait_replicas(installation, B, 1)


def successor_of(killed: Object, installation: Installation) -> bool:
    """Return the successor, once it is ready."""
    return any(is_ready(pod) for pod in pods_of(installation, B) if pod["metadata"]["uid"] != killed["metadata"]["uid"])


def roll_a_pool(installation: Installation) -> None:
    before = {pod["metadata"]["uid"] for pod in pods_of(installation, A)}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    installation.kubectl("annotate", "--overwrite", "samplerpool", A, f"tinsmith.dev/restart-requested-at={now}")

    def rolled() -> bool:
        return not before & {pod["metadata"]["uid"] for pod in pods_of(installation, A)}

    wait_for(rolled, 420, lambda: f"pool {A} keeps its old pods")
    wait_replicas(installation, A, 2)


def evict_a_replica(installation: Installation) -> None:
    """Evict a replica as a drain of its node does, which waits with the second one until the first is back."""
    first, second = (pod["metadata"]["name"] for pod in pods_of(installation, A))
    installation.evict(first)
    with pytest.raises(ClusterError, match="disruption budget"):
        installation.evict(second)
    wait_for(lambda: len(pods_of(installation, A)) == 2, 120, lambda: f"{first} has no successor")
    wait_replicas(installation, A, 2)


def scale_down(installation: Installation) -> None:
    """Remove a replica while programs sample. It ends when the results of its samples are fetched, and loses none."""
    before = lost_samples(installation)
    installation.kubectl("scale", "samplerpool", A, "--replicas=1")
    label = f"{POOL_LABEL}={A}"
    wait_for(lambda: len(installation.list("pod", label)) == 1, 120, lambda: f"pool {A} keeps its pods")
    assert lost_samples(installation) == before


def lost_samples(installation: Installation) -> float:
    """Return how many polls were answered by 410: their sample is lost, and the SDK submits it again."""
    servers = [pod["metadata"]["name"] for pod in installation.list("pod", API_SERVER) if is_ready(pod)]
    inside = f"/api/v1/namespaces/{installation.namespace}/pods"
    pages = [installation.kubectl("get", "--raw", f"{inside}/{name}:9090/proxy/metrics") for name in servers]
    return sum(float(count) for page in pages for count in LOST.findall(page))


def is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any((condition["type"], condition["status"]) == ("Ready", "True") for condition in conditions)


def kill_an_api_server(installation: Installation) -> None:
    installation.kill_api_servers(1)


def kill_the_worker(installation: Installation) -> None:
    installation.cluster.kill_container(installation.namespace, f"{SESSION}-0", "worker")


DISTURBANCES: list[Callable[[Installation], None]] = [
    scale_up,
    kill_a_replica,
    roll_a_pool,
    evict_a_replica,
    kill_an_api_server,
    scale_down,
    kill_the_worker,
]


@pytest.mark.usefixtures("pools")
def test_programs_notice_nothing_of_pools_that_scale_and_roll_and_pods_that_die(
    installation: Installation, saved: str, run: Run, undisturbed: Ending
) -> None:
    samplers: list[Open] = [on_base_model, lambda client: on_weights(client, saved), on_base_model]
    with sampling_load(lambda: connect(installation), samplers) as answers:
        wait_for_more(answers)
        ending = run(lambda: disturb(installation, answers))
    assert ending.ran_each_step_once()
    assert ending == undisturbed
    assert [of_one.conflicting for of_one in answers] == [set(), set(), set()]


@pytest.mark.usefixtures("pools")
def test_the_session_samples_if_no_pool_has_a_replica(installation: Installation, saved: str) -> None:
    for name in (A, B):
        installation.kubectl("scale", "samplerpool", name, "--replicas=0")
    for name in (A, B):
        wait_for(lambda name=name: not pods_of(installation, name), 90, lambda name=name: f"pool {name} keeps pods")  # type: ignore[misc]
    with sampling_load(lambda: connect(installation), [lambda client: on_weights(client, saved)]) as answers:
        wait_for_more(answers)
    for name in (A, B):
        installation.kubectl("scale", "samplerpool", name, "--replicas=1")
        wait_replicas(installation, name, 1)


def disturb(installation: Installation, answers: list[Answers]) -> None:
    for disturbance in DISTURBANCES:
        disturbance(installation)
        wait_for_more(answers, 6)


def connect(installation: Installation) -> tinker.ServiceClient:
    return installation.connect()


def on_base_model(client: tinker.ServiceClient) -> tinker.SamplingClient:
    return client.create_sampling_client(base_model=MODEL).result()


def on_weights(client: tinker.ServiceClient, path: str) -> tinker.SamplingClient:
    return client.create_sampling_client(model_path=path).result()


def pool_manifest(name: str) -> Object:
    """Return the pool of the examples under another name, and smaller: a node of two processors runs all of this."""
    manifest: Object = yaml.safe_load((EXAMPLES / "sampler-pool.yaml").read_text())
    manifest["metadata"]["name"] = name
    manifest["spec"]["replicas"] = 1
    manifest["spec"]["resources"]["requests"] = {"cpu": "100m", "memory": "512Mi"}
    return manifest


def pods_of(installation: Installation, pool: str) -> list[Object]:
    """Return the pods that stay."""
    pods = installation.list("pod", f"{POOL_LABEL}={pool}")
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def wait_replicas(installation: Installation, pool: str, count: int) -> None:
    def settled() -> bool:
        status = (installation.get("samplerpool", pool) or {}).get("status") or {}
        return status.get("replicas") == status.get("readyReplicas") == status.get("updatedReplicas") == count

    wait_for(settled, 420, lambda: f"{pool} is not at {count}: {installation.get('samplerpool', pool)}")
