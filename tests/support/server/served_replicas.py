"""Several `tinsmith serve` on one PostgreSQL and one session of a real Kubernetes API, behind one address.

The session's worker is a real process behind mutual TLS, and lives on when servers die, as a pod does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from support.server.operator_stand_in import StandInOperator
from support.server.postgres import PostgresServer
from support.server.round_robin import Ingress, round_robin
from support.server.serve_process import HTTP_OPTIONS, ServedInstallation
from support.worker.pod_worker import PodWorker
from testcluster.cluster import Cluster

SESSION = "tiny"
READY_SECONDS = 240.0


@dataclass(frozen=True)
class ServedReplicas:
    """`ingress` sends each request to another one; `checkpoints` is their checkpoint root."""

    servers: tuple[ServedInstallation, ...]
    ingress: Ingress
    worker: PodWorker
    postgres: PostgresServer
    checkpoints: Path

    def revive(self) -> None:
        """Starts those that are dead, and returns when all are ready."""
        for server in self.servers:
            if server.process is None:
                server.start()
        self.until_ready()

    def until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        for server in self.servers:
            while (answer := readiness(server)).status_code != 200:
                assert time.monotonic() < deadline, answer.text
                time.sleep(0.1)


def readiness(server: ServedInstallation) -> httpx.Response:
    return httpx.get(f"{server.url}/api/v1/readyz", **HTTP_OPTIONS)


@contextmanager
def served_replicas(
    cluster: Cluster, namespace: str, folder: Path, model: Path, model_name: str, postgres: PostgresServer
) -> Iterator[ServedReplicas]:
    """Two servers. KUBECONFIG must lead to the cluster, which must know our resources."""
    operator = StandInOperator(cluster, namespace, folder)
    worker = asyncio.run(_worker_of_session(operator, folder, model, model_name))
    url = postgres.create_schema()
    settings = {
        "fleet": "kubernetes",
        "fleet_namespaces": namespace,
        "fleet_tls_directory": str(operator.tls_directory),
        "database_url": url,
        "checkpoint_root": (folder / "checkpoints").as_uri(),
    }
    servers = tuple(ServedInstallation(folder / f"unused-{number}", {}, settings) for number in range(2))
    try:
        asyncio.run(_start(worker, operator))
        with round_robin([server.url for server in servers]) as ingress:
            replicas = ServedReplicas(servers, ingress, worker, postgres, folder / "checkpoints")
            replicas.revive()
            yield replicas
    finally:
        for server in servers:
            server.stop()
        asyncio.run(worker.discard())


async def _worker_of_session(operator: StandInOperator, folder: Path, model: Path, model_name: str) -> PodWorker:
    """Its identity is that of the session's volume claim."""
    await operator.apply(SESSION, model=model_name)
    flags = {"--model": str(model), "--model-name": model_name, "--engine": "peft", "--deterministic-sampling": None}
    return PodWorker(
        folder,
        flags,
        environment={"OMP_NUM_THREADS": "1"},
        authority=operator.authority,
        worker_id=await operator.claim(SESSION),
    )


async def _start(worker: PodWorker, operator: StandInOperator) -> None:
    """What the kubelet does, and what the operator says of it."""
    worker.start()
    await worker.until_status("readiness", serving=True, seconds=READY_SECONDS)
    await operator.say(SESSION, ready=True, message="It answers.", workerId=worker.worker_id, endpoint=worker.address)
