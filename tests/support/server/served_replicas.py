"""Several `tinsmith serve` on one PostgreSQL and one session of a real Kubernetes API, behind one address.

The session's worker is a real process behind mutual TLS, and lives on when servers die, as a pod does.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import httpx
from aiohttp import web
from support.server.operator_stand_in import StandInOperator
from support.server.postgres import PostgresServer
from support.server.serve_process import HTTP_OPTIONS, ServedInstallation
from support.worker.pod_worker import PodWorker
from testcluster.cluster import Cluster

START_SECONDS = 60.0
# Above any hold of a poll.
ANSWER_SECONDS = 60.0
NOT_PASSED_ON = {"host", "connection", "content-length", "transfer-encoding"}


@dataclass(frozen=True, slots=True)
class Ingress:
    """The address of the ingress."""

    url: str


@contextmanager
def round_robin(backends: Sequence[str]) -> Iterator[Ingress]:
    """Serve in a thread of its own.

    A backend that refuses the connection is skipped; one that breaks off in the middle of a request is a 502, as at any
    ingress: its effect is unknown.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="round robin")
    thread.start()
    proxy = _Proxy(backends)
    try:
        port = asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(START_SECONDS)
        yield Ingress(f"http://127.0.0.1:{port}")
    finally:
        asyncio.run_coroutine_threadsafe(proxy.stop(), loop).result(START_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Proxy:
    def __init__(self, backends: Sequence[str]) -> None:
        self._backends = backends
        self._turns = itertools.cycle(range(len(backends)))
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        # Without kept connections: one that a dead backend has left is known as such only when it is used.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)
        application = web.Application(client_max_size=2**30)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        first = next(self._turns)
        for backend in [*self._backends[first:], *self._backends[:first]]:
            try:
                return await self._ask(backend, request, body)
            except aiohttp.ClientConnectorError:
                continue
            except (aiohttp.ClientError, TimeoutError) as error:
                return web.Response(status=502, text=f"the backend broke off: {error!r}")
        return web.Response(status=503, text="no backend takes connections")

    async def _ask(self, backend: str, request: web.Request, body: bytes) -> web.Response:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in NOT_PASSED_ON}
        target = f"{backend}{request.rel_url}"
        async with self._session.request(
            request.method, target, data=body, headers=headers, skip_auto_headers=["Content-Type"]
        ) as answer:
            content = await answer.read()
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in NOT_PASSED_ON}
            return web.Response(status=answer.status, body=content, headers=kept)


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
        """Start the dead servers, and wait until all are ready."""
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
    """Return the worker of a session, whose identity is that of the session's volume claim."""
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
    """Start a pod as the kubelet does, with the status that the operator reports."""
    worker.start()
    await worker.until_status("readiness", serving=True, seconds=READY_SECONDS)
    await operator.say(SESSION, ready=True, message="It answers.", workerId=worker.worker_id, endpoint=worker.address)
