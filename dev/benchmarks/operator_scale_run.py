"""The phases of one run of `operator_scale.py`: creation, rest, repair, and restart."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from operator_scale_api import Api, Manifest, each
from operator_scale_sides import Requests, Side, Wanted, writes

CREATED_AT_ONCE = 16
LONGEST_SECONDS = 3600.0
REST_SECONDS = 60.0
CALM_SECONDS = 10.0
REPAIRS = 200
REPAIR_PAUSE_SECONDS = 0.2
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """The use of a process: seconds of processor, resident memory, and the largest resident memory so far."""

    cpu_seconds: float
    resident_mib: float
    peak_mib: float


@dataclass(frozen=True, slots=True)
class Creation:
    """The creation of all objects. Seconds count from the first request of the clients."""

    created_seconds: float
    first_ready_seconds: float
    workloads_seconds: float
    ready_seconds: float
    owner_p50_seconds: float
    owner_p99_seconds: float
    writes_each: float
    calls: Requests
    requests_a_second: float
    all_requests_a_second: float
    process: Process


@dataclass(frozen=True, slots=True)
class Rest:
    """One minute without a change."""

    requests: int
    writes: int
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Repair:
    """The milliseconds from the deletion of a Service until it exists again, as a watch reports both."""

    p50_ms: float
    p99_ms: float
    most_ms: float


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart after a signal, until all objects are reconciled."""

    seconds: float
    requests: int
    writes: int
    process: Process


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one operator. `described` is a minute in which the operator calls each worker once."""

    name: str
    owners: int
    creation: Creation
    rest: Rest
    repair: Repair
    restart: Restart
    described: Rest | None
    kill: Restart


@dataclass
class Progress:
    """The time at which each owner was ready and each workload was created, as the watches reported it."""

    ready: dict[str, float] = field(default_factory=dict)
    workloads: dict[str, float] = field(default_factory=dict)

    async def follow_owners(self, side: Side, api: Api, path: str) -> None:
        async for _, owner in api.watch(path):
            if side.is_ready(owner):
                self.ready.setdefault(_place(path, owner), time.monotonic())

    async def follow_workloads(self, api: Api, path: str, selector: str) -> None:
        query = [("labelSelector", selector)] if selector else []
        async for event, workload in api.watch(path, query):
            if event == "ADDED":
                self.workloads.setdefault(_place(path, workload), time.monotonic())


async def measure(side: Side, api: Api, say: Callable[[str], None]) -> Run:
    """Measure one operator in an empty cluster."""
    prefixes = {side.load.namespace(side.prefix, number) for number in range(side.load.namespaces)}
    await each(sorted(prefixes), lambda name: api.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}}), 4)
    owners = list(side.objects())
    operator = await _started(side)
    try:
        creation = await _creation(side, api, operator, owners, say)
        say(f"{side.name}: all ready after {creation.ready_seconds:.0f} s, {creation.writes_each:.1f} writes each")
        await _calm(side)
        rest = await _rest(side, operator)
        repair = await _repair(side, api)
        say(f"{side.name}: at rest {rest.cpu_seconds:.2f} s a minute, repair p99 {repair.p99_ms:.0f} ms")
        operator, restart = await _restart(side, operator, signal.SIGTERM, len(owners))
        await _calm(side)
        described = await _rest(side, operator) if side.calls_workers else None
        operator, kill = await _restart(side, operator, signal.SIGKILL, len(owners))
    finally:
        operator.kill()
        operator.wait()
    return Run(side.name, len(owners), creation, rest, repair, restart, described, kill)


async def _started(side: Side) -> subprocess.Popen[bytes]:
    operator = side.start()
    await _until(lambda: side.acts(side.page()), f"{side.name} starts", operator)
    return operator


async def _creation(
    side: Side, api: Api, operator: subprocess.Popen[bytes], owners: list[Wanted], say: Callable[[str], None]
) -> Creation:
    progress, made = Progress(), dict[str, float]()
    watches = [asyncio.create_task(progress.follow_owners(side, api, path)) for path in side.owners]
    watches += [asyncio.create_task(progress.follow_workloads(api, *place)) for place in side.workloads]
    await asyncio.sleep(2)
    before, cpu_before, all_before = side.requests(side.page()), used(operator.pid), await api.requests()

    async def create(wanted: Wanted) -> None:
        created = await api.call("POST", wanted.path, wanted.manifest)
        made[_place(wanted.path.replace(f"/namespaces/{created['metadata']['namespace']}", ""), created)] = (
            time.monotonic()
        )

    began = time.monotonic()
    await each(owners, create, CREATED_AT_ONCE)
    created_seconds = time.monotonic() - began

    def is_done() -> bool:
        return len(progress.ready) >= len(owners)

    await _until(is_done, f"all are ready with {side.name}", operator, say=lambda: say(_line(began, progress)))
    seconds = max(progress.ready.values()) - began
    calls = _difference(before, side.requests(side.page()))
    await _stop(watches)
    waits = sorted(progress.ready[place] - made[place] for place in made)
    process = used(operator.pid)
    return Creation(
        created_seconds=created_seconds,
        first_ready_seconds=min(progress.ready.values()) - began,
        workloads_seconds=max(progress.workloads.values()) - began,
        ready_seconds=seconds,
        owner_p50_seconds=statistics.median(waits),
        owner_p99_seconds=_percentile(waits, 0.99),
        writes_each=writes(calls) / len(owners),
        calls=calls,
        requests_a_second=sum(calls.values()) / seconds,
        all_requests_a_second=(await api.requests() - all_before) / seconds,
        process=Process(process.cpu_seconds - cpu_before.cpu_seconds, process.resident_mib, process.peak_mib),
    )


def _line(began: float, progress: Progress) -> str:
    seconds = time.monotonic() - began
    return f"{seconds:.0f} s: {len(progress.workloads)} workloads, {len(progress.ready)} ready"


async def _rest(side: Side, operator: subprocess.Popen[bytes]) -> Rest:
    # The metrics are read outside the measured time, because rendering them costs as much as a second of rest.
    before = side.requests(side.page())
    await asyncio.sleep(1)
    began = used(operator.pid).cpu_seconds
    await asyncio.sleep(REST_SECONDS)
    cpu_seconds = used(operator.pid).cpu_seconds - began
    calls = _difference(before, side.requests(side.page()))
    return Rest(sum(calls.values()), writes(calls), cpu_seconds)


async def _repair(side: Side, api: Api) -> Repair:
    deleted: dict[str, float] = {}
    taken: list[float] = []
    names: list[Manifest] = []

    async def follow() -> None:
        async for event, service in api.watch("/api/v1/services", [("labelSelector", side.service_label)]):
            place = _place("", service)
            if event == "DELETED":
                deleted[place] = time.monotonic()
            elif event == "ADDED" and place in deleted:
                taken.append((time.monotonic() - deleted.pop(place)) * 1000)
            elif event == "ADDED":
                names.append(service["metadata"])

    watch = asyncio.create_task(follow())
    await asyncio.sleep(3)
    chosen = random.Random(1).sample(names, min(REPAIRS, len(names)))
    for metadata in chosen:
        await api.call("DELETE", f"/api/v1/namespaces/{metadata['namespace']}/services/{metadata['name']}")
        await asyncio.sleep(REPAIR_PAUSE_SECONDS)
    await _until(lambda: len(taken) >= len(chosen), f"{side.name} makes the Services again")
    await _stop([watch])
    taken.sort()
    return Repair(statistics.median(taken), _percentile(taken, 0.99), taken[-1])


async def _restart(
    side: Side, operator: subprocess.Popen[bytes], number: signal.Signals, owners: int
) -> tuple[subprocess.Popen[bytes], Restart]:
    side.restarts()
    operator.send_signal(number)
    await asyncio.to_thread(operator.wait)
    began = time.monotonic()
    operator = await _started(side)
    await _until(lambda: side.reconciled(side.page()) >= owners, f"{side.name} reconciles all objects", operator)
    seconds = time.monotonic() - began
    calls = side.requests(side.page())
    return operator, Restart(seconds, sum(calls.values()), writes(calls), used(operator.pid))


async def _calm(side: Side) -> None:
    """Wait until the operator has sent no request for some time."""
    before: Requests = {}
    while (now := side.requests(side.page())) != before:
        before = now
        await asyncio.sleep(CALM_SECONDS)


async def _until(
    is_done: Callable[[], bool],
    what: str,
    operator: subprocess.Popen[bytes] | None = None,
    say: Callable[[], None] = lambda: None,
) -> None:
    began = said = time.monotonic()
    while not await asyncio.to_thread(is_done):
        now = time.monotonic()
        if now - began > LONGEST_SECONDS or (operator is not None and operator.poll() is not None):
            raise RuntimeError(f"not within {now - began:.0f} s: {what}")
        if now - said > 10:
            said = now
            say()
        await asyncio.sleep(0.2)


async def _stop(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)


def used(pid: int) -> Process:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M))
    cpu_seconds = (int(fields[11]) + int(fields[12])) / TICKS
    return Process(cpu_seconds, int(status["VmRSS"]) / 1024, int(status["VmHWM"]) / 1024)


def _place(path: str, manifest: Manifest) -> str:
    return f"{path} {manifest['metadata']['namespace']}/{manifest['metadata']['name']}"


def _difference(before: Requests, after: Requests) -> Requests:
    counts = {call: count - before.get(call, 0) for call, count in after.items()}
    return {call: count for call, count in sorted(counts.items(), key=lambda item: -item[1]) if count}


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * len(ordered)))]
