"""The operator under many TrainingSessions and SamplerPools, compared with KubeRay under as many RayClusters.

Each operator runs as a process against its own API server, etcd and controllers, without nodes; a stand-in makes pods
ready. Workers are a stand-in too, but the operator calls them by gRPC over mutual TLS. Everything runs on this machine,
so on two cores the API server and the controllers take part of the time of both operators.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from operator_scale_api import connected
from operator_scale_run import Rest, Restart, Run, measure
from operator_scale_sides import KubeRay, Load, Side, Tinsmith
from operator_scale_workers import make_certificates
from rich.console import Console
from rich.table import Table
from testcluster.cluster import Cluster, recorded
from testcluster.lifecycle import bring_down
from testcluster.places import Places
from testcluster.ports import free_port
from testcluster.record import read_record
from tinsmith_operator.settings import Settings

HERE = Path(__file__).parent
GOALS = {
    "writes for each object": "8",
    "first ready": "3 s",
    "all workloads created": "60 s",
    "all ready": "95 s",
    "memory": "200 MiB",
    "processor at rest, a minute": "0.2 s",
    "the same with a call of each worker": "1.5 s",
    "a deleted Service exists again, p99": "100 ms",
    "highest memory at a restart": "256 MiB",
}
"""The goals for 1,000 sessions and 100 pools at 100 requests a second."""
GOALS_OWNERS = 1100

Row = tuple[str, Callable[[Run], str]]


@contextmanager
def fresh_cluster(name: str) -> Iterator[Cluster]:
    """Start a control plane without nodes, in a process of its own, and remove it at the end."""
    command = [sys.executable, "-m", "testcluster", "up", f"--name={name}", "--tier=api"]
    try:
        subprocess.run(command, check=True, stdout=sys.stderr)
        record = read_record(Places(name))
        assert record is not None
        yield recorded(record)
    finally:
        bring_down(name)


@contextmanager
def background(directory: Path, program: str, *arguments: str) -> Iterator[None]:
    """Run a program of this directory until the end of the block."""
    with (directory / f"{program}.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, str(HERE / program), *arguments], stdout=log, stderr=log)
        try:
            yield
        finally:
            process.kill()
            process.wait()


def measured(kind: type[Side], load: Load, directory: Path) -> Run:
    """Measure one operator in its own cluster."""
    workers_port = free_port()
    with (
        fresh_cluster(f"scale-{os.getpid()}-{kind.prefix}") as cluster,
        background(directory, "operator_scale_workers.py", str(directory), str(workers_port)),
        background(directory, "operator_scale_kubelet.py", str(cluster.kubeconfig)),
    ):
        arguments = (cluster, load, directory, free_port())
        side = Tinsmith(*arguments, workers_port) if kind is Tinsmith else KubeRay(*arguments)
        side.install()

        async def run() -> Run:
            async with connected(cluster.kubeconfig) as api:
                return await measure(side, api, lambda line: print(line, file=sys.stderr, flush=True))

        return asyncio.run(run())


def _rest(rest: Rest | None) -> str:
    return "-" if rest is None else f"{rest.cpu_seconds:.2f} s, {rest.requests} requests"


def _restart(restart: Restart) -> str:
    return f"{restart.seconds:.0f} s, {restart.writes} writes, {restart.process.cpu_seconds:.0f} s of processor"


ROWS: Sequence[Row] = (
    ("objects", lambda run: f"{run.owners}"),
    ("created by 16 clients in", lambda run: f"{run.creation.created_seconds:.1f} s"),
    ("writes for each object", lambda run: f"{run.creation.writes_each:.1f}"),
    ("first ready", lambda run: f"{run.creation.first_ready_seconds:.1f} s"),
    ("all workloads created", lambda run: f"{run.creation.workloads_seconds:.0f} s"),
    ("all ready", lambda run: f"{run.creation.ready_seconds:.0f} s"),
    (
        "each object ready, p50, p99",
        lambda run: f"{run.creation.owner_p50_seconds:.0f}, {run.creation.owner_p99_seconds:.0f} s",
    ),
    ("requests a second", lambda run: f"{run.creation.requests_a_second:.0f}"),
    ("with those of controllers and clients", lambda run: f"{run.creation.all_requests_a_second:.0f}"),
    ("processor during the creation", lambda run: f"{run.creation.process.cpu_seconds:.0f} s"),
    ("memory", lambda run: f"{run.creation.process.resident_mib:.0f} MiB"),
    ("processor at rest, a minute", lambda run: _rest(run.rest)),
    ("the same with a call of each worker", lambda run: _rest(run.described)),
    ("a deleted Service exists again, p50", lambda run: f"{run.repair.p50_ms:.0f} ms"),
    ("a deleted Service exists again, p99", lambda run: f"{run.repair.p99_ms:.0f} ms"),
    ("restart after SIGTERM", lambda run: _restart(run.restart)),
    ("restart after SIGKILL", lambda run: _restart(run.kill)),
    ("highest memory at a restart", lambda run: f"{run.kill.process.peak_mib:.0f} MiB"),
)


def draw(runs: Sequence[Run]) -> Table:
    has_goals = runs[0].owners == GOALS_OWNERS
    table = Table("", *(run.name for run in runs), *(["goal"] if has_goals else []))
    for name, figure in ROWS:
        table.add_row(name, *(figure(run) for run in runs), *([GOALS.get(name, "")] if has_goals else []))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--pools", type=int, default=100)
    parser.add_argument("--namespaces", type=int, default=20)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second of each operator")
    parser.add_argument("--burst", type=int, default=200, help="requests of each operator at once")
    parser.add_argument("--reconciles", type=int, default=Settings.model_fields["concurrent_reconciles"].default)
    parser.add_argument("--only", choices=["tinsmith", "kuberay"], help="measure one operator")
    parser.add_argument("--logs", type=Path, help="keep the logs in this directory")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    load = Load(options.sessions, options.pools, options.namespaces, options.rate, options.burst, options.reconciles)
    sides: Sequence[type[Side]] = (Tinsmith, KubeRay)
    if options.only is not None:
        sides = (Tinsmith,) if options.only == "tinsmith" else (KubeRay,)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.logs or Path(temporary)
        directory.mkdir(exist_ok=True)
        make_certificates(directory)
        runs = [measured(side, load, directory) for side in sides]
    if options.json:
        print(json.dumps([asdict(run) for run in runs], indent=2))
    else:
        Console().print(draw(runs))


if __name__ == "__main__":
    main()
