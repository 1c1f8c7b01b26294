"""The slowdown of a tenant by another tenant's flood: latency under the flood, as a multiple of the latency alone.

The benchmark also measures the share of the machine that a tenant gets while the other tenant is connected but idle. A
scenario is a kind of load. Each scenario is a class that implements `fairness_scenarios.Scenario`, with a line in
`SCENARIOS`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fairness_requests import CreateBesideCreates, SmallBesideSmall
from fairness_sampling import SamplingBesideSampling
from fairness_scenarios import FloodProcess, Scenario, two_tenants
from fairness_training import one_forward, training_steps
from rich.console import Console
from rich.progress import track
from rich.table import Table

SCENARIOS: Mapping[str, Callable[[], Scenario]] = {
    "training-step": training_steps,
    "one-datum-forward": one_forward,
    "four-token-sample": SamplingBesideSampling,
    "small-request": SmallBesideSmall,
    "create": CreateBesideCreates,
}
BLOCKS = 5
REQUESTS = 20
"""The number of tenant B's requests in a block: the requests of B alone, and the requests during A's flood."""
FLOOD_SECONDS = 10.0
"""How long A's rate is measured, with and without B."""
MOST_TIMES_ALONE = 3.0
LEAST_SHARE = 0.9


@dataclass(slots=True)
class Measured:
    """The seconds of each request of B, and A's units per second. Each list has one entry for each request or block."""

    scenario: str
    unit: str
    alone: list[float] = field(default_factory=list)
    during_flood: list[float] = field(default_factory=list)
    rate_alone: list[float] = field(default_factory=list)
    rate_while_the_other_is_idle: list[float] = field(default_factory=list)
    rate_when_busy: list[float] = field(default_factory=list)

    @property
    def times_alone(self) -> float:
        """The 95th percentile of the latency under the flood, divided by the same percentile without the flood."""
        return p95(self.during_flood) / p95(self.alone)

    @property
    def idle_share(self) -> float:
        """Tenant A's rate while tenant B is connected and idle, as a share of A's rate without B."""
        return statistics.median(self.rate_while_the_other_is_idle) / statistics.median(self.rate_alone)

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "times_alone": self.times_alone, "idle_share": self.idle_share}


def p95(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1]


def measure(name: str, blocks: int, requests: int, scratch: Path) -> Measured:
    make = SCENARIOS[name]
    scenario = make()
    measured = Measured(name, scenario.unit)
    with two_tenants(scratch) as installation, closing(FloodProcess(make, installation)) as flood:
        for _ in track(range(blocks), name, console=Console(stderr=True), transient=True):
            measured.rate_alone.append(rate(flood))
            with scenario.requesting(installation) as request:
                request()
                measured.rate_while_the_other_is_idle.append(rate(flood))
                measured.alone += [request() for _ in range(requests)]
                with flood.running():
                    measured.during_flood += [request() for _ in range(requests)]
                    measured.rate_when_busy.append(flood.rate())
    return measured


def rate(flood: FloodProcess) -> float:
    with flood.running():
        flood.wait(FLOOD_SECONDS)
        return flood.rate()


def draw(results: Sequence[Measured]) -> Table:
    table = Table(title="A tenant during another tenant's flood")
    for heading in ("load", "alone", "during a flood", "times", "goal", "idle share", "goal", "share when busy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in results:
        busy_share = statistics.median(one.rate_when_busy) / statistics.median(one.rate_alone)
        table.add_row(
            one.scenario,
            f"{p95(one.alone) * 1e3:.0f} ms",
            f"{p95(one.during_flood) * 1e3:.0f} ms",
            f"[{'green' if one.times_alone <= MOST_TIMES_ALONE else 'red'}]{one.times_alone:.2f}",
            f"{MOST_TIMES_ALONE:.1f}",
            f"[{'green' if one.idle_share >= LEAST_SHARE else 'red'}]{one.idle_share:.2f}",
            f"{LEAST_SHARE:.1f}",
            f"{busy_share:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenario", choices=[*SCENARIOS, "all"], default="all")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument(
        "--requests", type=int, default=REQUESTS, help="requests of tenant B in a block, alone and during the flood"
    )
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": str(options.threads),
        "TINKER_TELEMETRY": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    results = []
    for name in SCENARIOS if options.scenario == "all" else [options.scenario]:
        with tempfile.TemporaryDirectory() as scratch:
            results.append(measure(name, options.blocks, options.requests, Path(scratch)))
    if options.json:
        print(json.dumps([one.as_json() for one in results], indent=2))
    else:
        Console(width=140).print(draw(results))


if __name__ == "__main__":
    main()
