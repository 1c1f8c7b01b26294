"""Many clients of many tenants at once on a real server and its worker: `make load`.

Each part says how many requests it held or sent, how long they took, and what the server's memory was before, at its
peak and after. It fails on any error, on memory beyond what the part may take, and where of tenants who ask for the
same one had less than its share.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from support.kubernetes.crds import install_crds
from support.kubernetes.fixtures import cluster_of_a_run
from support.server.postgres import postgres_server
from support.server.serve_process import ServedInstallation
from support.server.served_replicas import served_replicas
from support.worker.messages import forward_backward, next_token_datum
from tinsmith_server.services.accounts.keys import Keys
from tinsmith_server.settings import Settings
from tinsmith_server.store.store import open_store
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

MODEL = "load/tiny"
TENANTS = 64
POLLS = 1000
SAMPLES = 400
SAMPLED_TOKENS = 16
ROUNDS = 8
DATUMS = 16
DATUM_TOKENS = 64
"""The tokens of a round.

A tenant may be 1,280 tokens and a turn ahead of another: shares are of several times as much.
"""
BODY_BYTES = 100 * 2**20
BODIES = 3
MIB = 2**20
ANSWER_SECONDS = 900.0
LEAST_SHARE = 0.5
"""The share of the tenant that had most, when it had all."""
SETTINGS = {
    "max_body_bytes": str(128 * MIB),
    "connections_per_address": "4000",
    "session_timeout_seconds": "3600",
    "adapter_slots": str(TENANTS),
}
SERVERS_OWN = ("max_body_bytes", "connections_per_address", "session_timeout_seconds")
"""The settings of a server. In a cluster, sessions state the rest."""
KEPT_MIB = 64
"""The memory that a part may leave behind: arenas of the allocator, and caches with limits of their own."""


@dataclass
class Part:
    """The result of one part. `most_mib`: the additional memory that the server may take for it."""

    name: str
    most_mib: int
    seconds: float = 0.0
    before_mib: float = 0.0
    peak_mib: float = 0.0
    after_mib: float = 0.0
    errors: list[str] = field(default_factory=list)
    resent: int = 0
    share: float | None = None

    def verdict(self) -> list[str]:
        """Return the failure, or None."""
        wrong = [f"{self.name}: {error}" for error in self.errors[:5]]
        if self.peak_mib - self.before_mib > self.most_mib:
            wrong.append(f"{self.name}: took {self.peak_mib - self.before_mib:.0f} MiB, of {self.most_mib}")
        if self.after_mib - self.before_mib > KEPT_MIB:
            wrong.append(f"{self.name}: kept {self.after_mib - self.before_mib:.0f} MiB, of {KEPT_MIB}")
        if self.share is not None and self.share < LEAST_SHARE:
            wrong.append(f"{self.name}: a tenant had {self.share:.2f} of what another had")
        return wrong


class Memory:
    """The resident memory of the server that has most, looked at ten times a second while a part runs."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    def mib(self) -> float:
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._pids]
        return max(pages) * 4096 / MIB

    @asynccontextmanager
    async def watched(self, part: Part) -> AsyncIterator[None]:
        over = threading.Event()
        part.before_mib = part.peak_mib = self.mib()

        def watch() -> None:
            while not over.wait(0.1):
                part.peak_mib = max(part.peak_mib, self.mib())

        watching = threading.Thread(target=watch)
        watching.start()
        started = time.monotonic()
        try:
            yield
        finally:
            part.seconds = time.monotonic() - started
            over.set()
            watching.join()
            await asyncio.sleep(2)  # until the server has released what the answers held
            part.after_mib = self.mib()


class Clients:
    """A tenant's connections to each server: it asks them in turn, as through an ingress."""

    def __init__(self, urls: Sequence[str], key: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._clients = [
            httpx.AsyncClient(
                base_url=f"{url}/api/v1",
                headers={"X-API-Key": key},
                timeout=ANSWER_SECONDS,
                trust_env=False,
                limits=limits,
            )
            for url in urls
        ]
        self._turns = itertools.cycle(self._clients)

    async def post(self, path: str, **content: Any) -> httpx.Response:
        return await next(self._turns).post(path, **content)

    async def get(self, path: str) -> httpx.Response:
        return await next(self._turns).get(path)

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()


@dataclass(frozen=True)
class Tenant:
    """One client, with a session and a model of its own."""

    client: Clients
    session_id: str
    model_id: str
    resent: Counter[str]
    """The reasons of all tenants."""

    async def post(self, path: str, body: dict[str, Any] | bytes) -> httpx.Response:
        """Post as SDKs do: a request without room, or with a lost connection, is sent again."""
        content: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        until = time.monotonic() + ANSWER_SECONDS
        while True:
            try:
                answer = await self.client.post(path, **content)
                why = str(answer.status_code)
            except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError) as error:
                answer, why = httpx.Response(503, text=repr(error)), type(error).__name__
            if answer.status_code not in (429, 503) or time.monotonic() > until:
                return answer
            self.resent[why] += 1
            await asyncio.sleep(0.5)

    async def begun(self, path: str, body: dict[str, Any] | bytes) -> str:
        return str((await self.post(path, body)).raise_for_status().json()["request_id"])

    async def result(self, request_id: str) -> httpx.Response:
        """Poll until the result exists."""
        until = time.monotonic() + ANSWER_SECONDS
        while (answer := await self.poll(request_id)).status_code == 408 and time.monotonic() < until:
            pass
        return answer.raise_for_status()

    async def poll(self, request_id: str) -> httpx.Response:
        return await self.post("/retrieve_future", {"request_id": request_id})

    async def forward_backward(self, number: int, tokens: int, datums_of_it: int = 4) -> str:
        datums = [next_token_datum([(number + at) % 16 for at in range(tokens)]) for _ in range(datums_of_it)]
        return await self.begun("/forward_backward", forward_backward(datums, model_id=self.model_id, seq_id=number))

    async def optim_step(self, number: int) -> str:
        return await self.begun("/optim_step", {"model_id": self.model_id, "seq_id": number})

    async def computed(self, operation: str, latest: int) -> list[int]:
        """Return when each of the latest operations of that name was computed, in microseconds, in order."""
        link = (await self.client.get(f"/sessions/{self.session_id}/trace_export")).raise_for_status().json()["url"]
        events = (await self.client.get(link)).raise_for_status().json()["traceEvents"]
        ends = [event["ts"] + event["dur"] for event in events if event["name"] == operation]
        return sorted(ends)[-latest:]


async def held_polls(tenants: Sequence[Tenant], part: Part) -> None:
    """Hold polls for operations that wait for a number until the end of a hold: many polls for each tenant."""
    waiting = [await tenant.forward_backward(2, 8) for tenant in tenants]
    polls = [tenants[at % len(tenants)].poll(waiting[at % len(tenants)]) for at in range(POLLS)]
    answers = await asyncio.gather(*polls, return_exceptions=True)
    part.errors += [repr(one) for one in answers if not isinstance(one, httpx.Response) or one.status_code != 408]
    for tenant in tenants:
        await tenant.forward_backward(1, 8)
    results = await asyncio.gather(*(tenant.result(one) for tenant, one in zip(tenants, waiting, strict=True)))
    part.errors += [one.text for one in results if one.headers["content-type"] == "application/json"]


async def sessions(tenants: Sequence[Tenant], part: Part) -> None:
    """Run a thousand sessions that beat, and end."""

    async def live(tenant: Tenant) -> None:
        made = await tenant.post("/create_session", {"tags": []})
        session_id = made.raise_for_status().json()["session_id"]
        (await tenant.post("/session_heartbeat", {"session_id": session_id})).raise_for_status()
        body = {"reason": {"type": "success"}}
        (await tenant.post(f"/sessions/{session_id}/finish", body)).raise_for_status()

    await _all(part, [live(tenants[at % len(tenants)]) for at in range(POLLS)])


async def samples(tenants: Sequence[Tenant], part: Part) -> None:
    async def sampler(tenant: Tenant) -> str:
        body = {"session_id": tenant.session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
        made = await tenant.post("/create_sampling_session", body)
        return str(made.raise_for_status().json()["sampling_session_id"])

    samplers = [await sampler(tenant) for tenant in tenants]

    async def sample(at: int) -> None:
        tenant = tenants[at % len(tenants)]
        body = {
            "sampling_session_id": samplers[at % len(tenants)],
            "seq_id": at,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": SAMPLED_TOKENS, "seed": at, "stop": []},
        }
        result = await tenant.result(await tenant.begun("/asample", body))
        if result.headers["content-type"] == "application/json":
            part.errors.append(result.text)

    await _all(part, [sample(at) for at in range(SAMPLES)])


async def training(tenants: Sequence[Tenant], part: Part) -> None:
    """Train equally much for each tenant at once: the work exists before the first number arrives.

    Shares are what each had been computed when the first had all, as the workers' traces have it: answers come to the
    clients of one process in any order.
    """
    numbers = range(3, 3 + ROUNDS)

    async def train(tenant: Tenant, futures: list[str]) -> None:
        futures.append(await tenant.forward_backward(numbers[0], DATUM_TOKENS, DATUMS))
        for future in [*futures, await tenant.optim_step(numbers[-1] + 1)]:
            result = await tenant.result(future)
            if "error" in result.text:
                part.errors.append(result.text)

    behind = [
        [await tenant.forward_backward(number, DATUM_TOKENS, DATUMS) for number in numbers[1:]] for tenant in tenants
    ]
    await _all(part, [train(*each) for each in zip(tenants, behind, strict=True)])
    computed = [await tenant.computed("forward_backward", ROUNDS) for tenant in tenants]
    first = min(ends[-1] for ends in computed)
    had = [sum(end <= first for end in ends) for ends in computed]
    part.share = min(had) / max(had)


async def bodies(tenants: Sequence[Tenant], part: Part) -> None:
    """No message that anybody could read: its future fails, which is known when all of it has come and was kept."""

    async def send(tenant: Tenant, number: int) -> None:
        head = forward_backward([], model_id=tenant.model_id, seq_id=number)
        body = head + b"\xff" * (BODY_BYTES - len(head))
        result = await tenant.result(await tenant.begun("/forward_backward", body))
        if result.json().get("category") != "user":
            part.errors.append(result.text)

    number = 3 + ROUNDS + 1
    await _all(part, [send(tenant, number) for tenant in tenants[:BODIES]])


async def _all(part: Part, work: Sequence[Awaitable[None]]) -> None:
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    part.errors += [repr(outcome) for outcome in outcomes if outcome is not None]


PARTS: Sequence[tuple[str, int, Callable[[Sequence[Tenant], Part], Awaitable[None]]]] = (
    (f"{POLLS} polls held", 160, held_polls),
    (f"{POLLS} sessions", 160, sessions),
    (f"{SAMPLES} samples at once", 160, samples),
    (f"{TENANTS} tenants train", 160, training),
    # Each byte in flight takes up to three of memory.
    (f"{BODIES} bodies of {BODY_BYTES // MIB} MiB", 3 * BODIES * BODY_BYTES // MIB + 64, bodies),
)


@asynccontextmanager
async def tenants_of(urls: Sequence[str], keys: Sequence[str]) -> AsyncIterator[list[Tenant]]:
    clients = [Clients(urls, key) for key in keys]
    try:
        resent: Counter[str] = Counter()
        yield [await _tenant(client, resent) for client in clients]
    finally:
        for client in clients:
            await client.aclose()


async def _tenant(client: Clients, resent: Counter[str]) -> Tenant:
    session_id = (await client.post("/create_session", json={"tags": []})).raise_for_status().json()["session_id"]
    lora = {"rank": 4, "seed": 1}
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
    made = (await client.post("/create_model", json=body)).raise_for_status().json()
    tenant = Tenant(client, session_id, made["model_id"], resent)
    await tenant.result(made["request_id"])
    return tenant


async def keys_of_tenants(store_url: str) -> list[str]:
    store = await open_store(store_url)
    try:
        keys = Keys(store, None)
        return [(await keys.create(f"tenant-{number}", "of a load")).secret for number in range(TENANTS)]
    finally:
        await store.close()


async def run(servers: Sequence[ServedInstallation], keys: Sequence[str]) -> list[Part]:
    pids = [server.process.pid for server in servers if server.process is not None]
    memory, parts = Memory(pids), []
    async with tenants_of([server.url for server in servers], keys) as tenants:
        for name, most_mib, work in PARTS:
            part = Part(name, most_mib)
            resent = tenants[0].resent
            resent.clear()
            async with memory.watched(part):
                try:
                    await work(tenants, part)
                except httpx.HTTPError as error:
                    part.errors.append(repr(error))
            part.resent = resent.total()
            parts.append(part)
            print(f"{name}: {part.seconds:.0f} s, {len(part.errors)} errors, sent again: {dict(resent)}", flush=True)
    return parts


def table_of(servers: int, parts: Sequence[Part]) -> Table:
    table = Table(
        "load",
        "seconds",
        "before",
        "peak",
        "after",
        "bound",
        "least share",
        "sent again",
        "errors",
        title="MiB of the server",
    )
    for part in parts:
        figures = (part.seconds, part.before_mib, part.peak_mib, part.after_mib, part.before_mib + part.most_mib)
        share = "" if part.share is None else f"{part.share:.2f}"
        table.add_row(
            part.name, *(f"{figure:.0f}" for figure in figures), share, str(part.resent), str(len(part.errors))
        )
    return table


@contextmanager
def one_server(folder: Path, model: Path) -> Iterator[tuple[Sequence[ServedInstallation], str]]:
    """Start a server with a worker of its own, on SQLite. Yields its store's URL, too."""
    server = ServedInstallation(folder / "data", {MODEL: model}, SETTINGS)
    server.data.mkdir()
    store_url = Settings(data=server.data).store_url
    try:
        yield [server.start()], store_url
    finally:
        server.stop()


@contextmanager
def two_servers(folder: Path, model: Path) -> Iterator[tuple[Sequence[ServedInstallation], str]]:
    """Start two servers on one PostgreSQL and one session of a Kubernetes API, with a worker behind mutual TLS."""
    os.environ.update({f"TINSMITH_{name.upper()}": value for name, value in SETTINGS.items() if name in SERVERS_OWN})
    with cluster_of_a_run("api", nodes=0) as cluster, postgres_server() as postgres:
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
        install_crds(cluster.kubectl)
        namespace = f"load-{os.getpid()}"
        cluster.make_namespace(namespace)
        with served_replicas(cluster, namespace, folder, model, MODEL, postgres) as replicas:
            yield replicas.servers, replicas.servers[0].settings["database_url"]
        cluster.delete_namespace(namespace)


SERVERS: Mapping[int, Callable[[Path, Path], AbstractContextManager[tuple[Sequence[ServedInstallation], str]]]] = {
    1: one_server,
    2: two_servers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, choices=SERVERS, action="append", help="by default 1, then 2")
    wrong = []
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A server takes half as many connections as it may open files.
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most_files, 4 * POLLS), most_files))
    for count in parser.parse_args().servers or SERVERS:
        with tempfile.TemporaryDirectory(prefix="load-") as folder:
            model = make_tiny_model(Path(folder) / "model")
            with SERVERS[count](Path(folder), model) as (servers, store_url):
                parts = asyncio.run(_run_with_keys(servers, store_url))
        Console(width=120).print(table_of(count, parts))
        wrong += [f"{count} server(s): {sentence}" for part in parts for sentence in part.verdict()]
    if wrong:
        sys.exit("\n".join(wrong))


async def _run_with_keys(servers: Sequence[ServedInstallation], store_url: str) -> list[Part]:
    return await run(servers, await keys_of_tenants(store_url))


if __name__ == "__main__":
    main()
