"""A server of two tenants, one of which attacks it; and sockets on which anything can be said."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from support.server.serve_process import TESTS, ServedInstallation
from tinsmith_server.services.accounts.keys import Keys
from tinsmith_server.settings import Settings
from tinsmith_server.store.store import open_store

MODEL = "org/tiny"
PROGRAM = (sys.executable, "-m", "support.server.serve_with_fake_worker")
ANSWER_SECONDS = 60.0


async def _make_key(settings: Settings, tenant: str) -> str:
    store = await open_store(settings.store_url)
    try:
        return (await Keys(store, None).create(tenant, "of a test")).secret
    finally:
        await store.close()


@dataclass(frozen=True)
class AttackedServer:
    """A real process on a real port, with a key of each tenant."""

    installation: ServedInstallation
    keys: Mapping[str, str]

    @classmethod
    def start(cls, folder: Path, **settings: str) -> AttackedServer:
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        data = folder / "data"
        data.mkdir()
        keys = {name: asyncio.run(_make_key(Settings(data=data), name)) for name in ("attacker", "victim", "fuzzer")}
        installation = ServedInstallation(data, {MODEL: model}, settings, program=PROGRAM)
        return cls(installation.start(), keys)

    @property
    def pid(self) -> int:
        assert self.installation.process is not None
        return self.installation.process.pid

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * 4096

    @asynccontextmanager
    async def tenant(self, name: str) -> AsyncIterator[Tenant]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            base_url=f"{self.installation.url}/api/v1",
            headers={"X-API-Key": self.keys[name]},
            timeout=ANSWER_SECONDS,
            trust_env=False,
            verify=False,  # it speaks http, and to load the public certificates takes 30 ms of CPU
            limits=limits,
        ) as client:
            yield Tenant(client)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.installation.port)
        try:
            yield reader, writer
        finally:
            writer.close()

    def head(self, path: str, key: str = "attacker", **fields: object) -> bytes:
        """Return the header of a POST."""
        lines = [f"POST /api/v1{path} HTTP/1.1", "Host: server", f"X-API-Key: {self.keys[key]}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
        return "\r\n".join([*lines, "", ""]).encode()


@dataclass(frozen=True)
class Tenant:
    """A tenant with its models and requests."""

    client: httpx.AsyncClient

    async def post(self, path: str, body: Any) -> httpx.Response:
        if isinstance(body, bytes):
            return await self.client.post(path, content=body)
        return await self.client.post(path, json=body)

    async def session(self) -> str:
        return str((await self.post("/create_session", {"tags": []})).raise_for_status().json()["session_id"])

    async def model(self, session_id: str, number: int = 0) -> str:
        body = {"session_id": session_id, "model_seq_id": number, "base_model": MODEL}
        made = (await self.post("/create_model", body)).raise_for_status().json()
        (await self.post("/retrieve_future", {"request_id": made["request_id"]})).raise_for_status()
        return str(made["model_id"])

    async def sampler(self, session_id: str, number: int = 0) -> str:
        body = {"session_id": session_id, "sampling_session_seq_id": number, "base_model": MODEL}
        made = await self.post("/create_sampling_session", body)
        return str(made.raise_for_status().json()["sampling_session_id"])


async def answer(reader: asyncio.StreamReader) -> int:
    """Return the status of the next answer; 0 where the connection ends without one."""
    try:
        line = await asyncio.wait_for(reader.readline(), ANSWER_SECONDS)
    except ConnectionError:
        return 0
    return int(line.split()[1]) if line else 0


class Victim:
    """Sends one small request after the other (`victim.py`)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def of(cls, server: AttackedServer) -> AsyncIterator[Victim]:
        async with server.tenant("victim") as tenant:
            session_id = await tenant.session()
        arguments = (str(server.pid), str(server.installation.port), server.keys["victim"], session_id)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "support.server.victim", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            limit=2**24,
        )
        try:
            yield cls(process)
        finally:
            process.kill()
            await process.wait()

    async def seconds(self) -> list[float]:
        """Return the duration of each request since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        taken: list[float] = json.loads(await self._process.stdout.readline())
        return taken


def p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


class Uploads:
    """Bodies of training requests, each sent but for its last byte as far as the server takes it."""

    def __init__(self) -> None:
        self.sent = 0
        self._moved = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def held(cls, server: AttackedServer, count: int, size: int, beginning: bytes) -> AsyncIterator[Uploads]:
        uploads = cls()
        tasks = [asyncio.create_task(uploads._send(server, size, beginning)) for _ in range(count)]
        try:
            yield uploads
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, server: AttackedServer, size: int, beginning: bytes) -> None:
        part = bytes(2**16)
        async with server.connected() as (_, writer):
            writer.write(server.head("/forward_backward", content_length=size) + beginning)
            for _ in range(size // len(part) - 1):
                writer.write(part)
                await writer.drain()
                self.sent += len(part)
                self._moved.set()
            await asyncio.Event().wait()

    async def until_nothing_moves(self) -> None:
        """Wait until nothing moves for two seconds, of the twenty for which a body waits for room."""
        while True:
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), 2)
            except TimeoutError:
                return
