"""Operators for tests against a real API server: in this process, or as programs of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import aiohttp
from support.kubernetes.kubectl import KubectlError, KubectlUser
from tinsmith_operator.common.observed import WorkerReport
from tinsmith_operator.errors import OperatorError
from tinsmith_operator.kube.client import Permit
from tinsmith_operator.kube.resources import POOLS, SESSIONS, Resource
from tinsmith_operator.runtime.running import Operator
from tinsmith_operator.runtime.worker_client import Target
from tinsmith_operator.settings import Settings

WAIT_SECONDS = 100.0
WRITES = ("create", "patch", "update", "delete")
IMAGE = "tinsmith.local/tinsmith/trainer:0.1.0"


def settings_for(namespace: str, **changes: Any) -> Settings:
    """Return settings for an installation in that namespace, with short waits and free ports."""
    least = {
        "namespace": namespace,
        "trainer_image": IMAGE,
        "checkpoint_root": "s3://bucket/checkpoints",
        "health_port": 0,
        "metrics_port": 0,
        "max_requests_per_second": 200,
        "burst": 200,
        "lease_seconds": 3,
        "describe_seconds": 1,
    }
    return Settings.model_validate({**least, **changes})


def session_manifest(name: str = "tiny", **spec: Any) -> dict[str, Any]:
    """Return a minimal TrainingSession with these fields of its spec."""
    return _least(SESSIONS, name, spec)


def pool_manifest(name: str = "tiny", **spec: Any) -> dict[str, Any]:
    """Return a minimal SamplerPool with these fields of its spec."""
    return _least(POOLS, name, spec)


def _least(resource: Resource, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    source = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "models", "path": "tiny"}}
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": name},
        "spec": {"model": {"name": "demo/tiny", "source": source}, **spec},
    }


async def content_worker(target: Target) -> WorkerReport:
    """Run a worker that holds nothing and does nothing."""
    return WorkerReport(
        pod_uid=target.pod_uid,
        received_at=datetime.now(UTC),
        epoch=1,
        adapters_used=0,
        model_places=8,
        running_seconds=0.0,
        snapshot_seconds=1.0,
        last_snapshot_time=None,
        volume_full=False,
    )


class PowerCut(OperatorError):
    """The end of an operator, as the cluster sees it."""


class Writes:
    """Counts an operator's writes, and lets none through from the `cut_before`-th on (from 1; 0 cuts nothing)."""

    def __init__(self, cut_before: int = 0) -> None:
        self.count = 0
        self.cut_before = cut_before
        self.was_cut = asyncio.Event()

    def around(self, permit: Permit) -> Permit:
        def counted() -> float:
            seconds = permit()
            self.count += 1
            if self.cut_before and self.count >= self.cut_before:
                self.was_cut.set()
                raise PowerCut(f"cut before write {self.cut_before}")
            return seconds

        return counted


@asynccontextmanager
async def running(
    settings: Settings, writes: Writes | None = None, describe: Any = content_worker, snapshot: Any = None
) -> AsyncIterator[Operator]:
    """Run an operator, which leads when no other does, until the end of the block."""
    operator = Operator(settings, around_permit=(writes or Writes()).around, describe=describe, snapshot=snapshot)
    stop = asyncio.Event()
    task = asyncio.create_task(operator.run(stop))
    try:
        yield operator
    finally:
        stop.set()
        await task


async def eventually(
    look: Callable[[], Awaitable[Any]], what: str, seconds: float = WAIT_SECONDS, pause_seconds: float = 0.1
) -> Any:
    """Return the first true answer. Raises AssertionError with the last one."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + seconds
    while not (answer := await _patiently(look)):
        if loop.time() > ends_at:
            raise AssertionError(f"not within {seconds:g} s: {what}; last seen: {answer!r}")
        await asyncio.sleep(pause_seconds)
    return answer


async def _patiently(look: Callable[[], Awaitable[Any]]) -> Any:
    """Retry while an overloaded API server does not answer."""
    try:
        return await look()
    except (TimeoutError, aiohttp.ClientError):
        return None
    except KubectlError as error:
        if error.status != 429 and error.status < 500:
            raise
        return None


class OperatorProgram:
    """`python3 -m tinsmith_operator`, with its log in memory."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._reader = asyncio.create_task(self._read())
        self.lines: list[str] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the end, and return the exit status; negative for the signal that killed it."""
        async with asyncio.timeout(WAIT_SECONDS):
            code = await self._process.wait()
            await self._reader
        return code

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self.lines.append(line.decode().rstrip())


@asynccontextmanager
async def operator_program(settings: Settings, **environment: str) -> AsyncIterator[OperatorProgram]:
    """Killed at the end of the block if it still runs then."""
    given = {
        f"TINSMITH_OPERATOR_{name.upper()}": json.dumps(value) if isinstance(value, dict | list) else str(value)
        for name, value in settings.model_dump(exclude_none=True, by_alias=True).items()
        if value != ""
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tinsmith_operator",
        env={**os.environ, **given, **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    program = OperatorProgram(process)
    try:
        yield program
    finally:
        if process.returncode is None:
            process.kill()
        await program.ended()


async def writes_of(settings: Settings) -> int:
    """Return how many writes an operator has counted, except those of its lease. It needs a metrics port."""
    url = f"http://127.0.0.1:{settings.metrics_port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        page = await response.text()
    counted = re.findall(
        r'^tinsmith_operator_api_requests_total{code="2\d\d",resource="([^"]+)",verb="(\w+)"} (\S+)', page, re.M
    )
    return sum(int(float(count)) for resource, verb, count in counted if verb in WRITES and resource != "leases")


async def comes_to_rest(
    hands: KubectlUser,
    reason: str,
    name: str = "tiny",
    seconds: float = WAIT_SECONDS,
    *,
    resource: Resource = SESSIONS,
) -> Any:
    """Wait until the object is at rest for its present spec, and Ready gives that reason."""

    async def look() -> Any:
        owner = await hands.get(resource, name)
        ready, reconciling = condition_of(owner, "Ready"), condition_of(owner, "Reconciling")
        current = reconciling.get("observedGeneration") == (owner or {}).get("metadata", {}).get("generation")
        return owner if current and (reconciling["status"], ready["reason"]) == ("False", reason) else None

    try:
        return await eventually(look, f"{name} comes to rest as {reason}", seconds)
    except AssertionError as error:
        said = condition_of(await hands.get(resource, name), "Ready")
        raise AssertionError(f"{error}; it says {said}") from None


def condition_of(owner: dict[str, Any] | None, type_: str) -> dict[str, Any]:
    conditions = ((owner or {}).get("status") or {}).get("conditions", [])
    return next((condition for condition in conditions if condition["type"] == type_), {})
