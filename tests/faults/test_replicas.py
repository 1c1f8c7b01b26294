"""Two servers on one PostgreSQL behind an ingress, killed and stopped in the middle of an unmodified SDK program.

The program does not notice, and leaves behind what an undisturbed run leaves behind at one server, bit for bit.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
from support.client.pipelined_program import TINY_MODEL, Ending, run_on
from support.client.sdk import QUESTION, Served, service_client
from support.server.postgres import postgres_server
from support.server.served_replicas import ServedReplicas, readiness, served_replicas
from testcluster.cluster import Cluster

# The first test waits for a cluster, a database, a worker and two servers.
pytestmark = pytest.mark.timeout(900)

SAMPLES = 8
DISTURBANCES = 4


@pytest.fixture(scope="module")
def replicas(
    session_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[ServedReplicas]:
    namespace = f"replicas-{os.getpid()}"
    session_cluster.make_namespace(namespace)
    with pytest.MonkeyPatch.context() as environment, postgres_server() as postgres:
        environment.setenv("KUBECONFIG", str(session_cluster.kubeconfig))
        folder = tmp_path_factory.mktemp("replicas")
        with served_replicas(session_cluster, namespace, folder, tiny_model, TINY_MODEL, postgres) as served:
            yield served
    session_cluster.delete_namespace(namespace)


@pytest.fixture(scope="module")
def undisturbed_samples(replicas: ServedReplicas) -> list[list[int]]:
    return sample(replicas.ingress)


def sample(server: Served) -> list[list[int]]:
    """All at once, so that some are on their way whenever something dies."""
    params = tinker.SamplingParams(max_tokens=6, seed=7, temperature=1.0)
    prompts = [tinker.ModelInput.from_ints([*QUESTION, number]) for number in range(SAMPLES)]
    with service_client(server) as client:
        sampler = client.create_sampling_client(base_model=TINY_MODEL).result()
        futures = [sampler.sample(prompt, num_samples=1, sampling_params=params) for prompt in prompts]
        return [list(future.result().sequences[0].tokens) for future in futures]


def kill_both(replicas: ServedReplicas) -> None:
    for server in replicas.servers:
        server.kill()
    replicas.revive()


def stop_one_after_the_other(replicas: ServedReplicas) -> None:
    """Stop the servers one after the other, as a rolling update does."""
    for server in replicas.servers:
        assert server.stop() == 0
        replicas.revive()


def restart_the_database(replicas: ServedReplicas) -> None:
    replicas.postgres.crash()
    try:
        answers = [readiness(server) for server in replicas.servers]
        assert [answer.status_code for answer in answers] == [503, 503]
        # The second where its own patience is over before the refusal has reached it.
        assert re.search("is not available|has not answered", answers[0].json()["detail"])
    finally:
        replicas.postgres.start()
    replicas.until_ready()


def kill_the_next(replicas: ServedReplicas, number: int) -> None:
    replicas.servers[number % len(replicas.servers)].kill()
    replicas.revive()


def crash_the_database(replicas: ServedReplicas, _number: int) -> None:
    replicas.postgres.crash()
    time.sleep(0.5)
    replicas.postgres.start()
    replicas.until_ready()
    time.sleep(1)


@contextmanager
def again_and_again(disturb: Callable[[int], None]) -> Iterator[list[float]]:
    """Each time as soon as all is well again. Yields when it was disturbed."""
    times: list[float] = []
    enough = threading.Event()

    def go_on() -> None:
        while not enough.wait(0.3):
            disturb(len(times))
            times.append(time.monotonic())

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield times
    finally:
        enough.set()
        thread.join()


@pytest.mark.parametrize("disturbance", [kill_both, stop_one_after_the_other, restart_the_database])
def test_a_program_does_not_notice(
    disturbance: Callable[[ServedReplicas], None], replicas: ServedReplicas, undisturbed: Ending
) -> None:
    ending = run_on(replicas.ingress, replicas.checkpoints, lambda: disturbance(replicas))
    assert ending.ran_each_step_once()
    assert ending == undisturbed


@pytest.mark.parametrize("disturbance", [kill_the_next, crash_the_database])
def test_a_program_does_not_notice_disturbances_during_its_whole_run(
    disturbance: Callable[[ServedReplicas, int], None],
    replicas: ServedReplicas,
    undisturbed: Ending,
    undisturbed_samples: list[list[int]],
) -> None:
    endings, samples = [], []
    with again_and_again(lambda number: disturbance(replicas, number)) as times:
        while len(times) < DISTURBANCES:
            endings.append(run_on(replicas.ingress, replicas.checkpoints, lambda: None))
            samples.append(sample(replicas.ingress))
    assert [ending == undisturbed for ending in endings] == [True] * len(endings)
    assert samples == [undisturbed_samples] * len(samples)
