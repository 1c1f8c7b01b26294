"""What one tenant's flood costs another: latency beside a flood, as a multiple of the latency alone.

And what a tenant has of the machine while the other one, who is there, asks for nothing. A scenario is a kind of load;
another one is a class that keeps `fairness_scenarios.Scenario`, and a line in `SCENARIOS`.
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
"""Of B's, in a block: alone, and beside A's flood."""
FLOOD_SECONDS = 10.0
"""In which A's rate is taken, with and without B."""
MOST_TIMES_ALONE = 3.0
LEAST_SHARE = 0.9


@dataclass(slots=True)
class Measured:
    """Seconds of B's requests; of A, units a second. One list entry a request, or a block."""

    scenario: str
    unit: str
    alone: list[float] = field(default_factory=list)
    beside_the_flood: list[float] = field(default_factory=list)
    rate_by_itself: list[float] = field(default_factory=list)
    rate_while_the_other_is_idle: list[float] = field(default_factory=list)
    rate_beside_the_other: list[float] = field(default_factory=list)

    @property
    def times_alone(self) -> float:
        """At the 95th percentile."""
        return p95(self.beside_the_flood) / p95(self.alone)

    @property
    def idle_share(self) -> float:
        """Of what A gets by itself, while B is there and idle."""
        return statistics.median(self.rate_while_the_other_is_idle) / statistics.median(self.rate_by_itself)

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
            measured.rate_by_itself.append(rate(flood))
            with scenario.requesting(installation) as request:
                request()
                measured.rate_while_the_other_is_idle.append(rate(flood))
                measured.alone += [request() for _ in range(requests)]
                with flood.running():
                    measured.beside_the_flood += [request() for _ in range(requests)]
                    measured.rate_beside_the_other.append(flood.rate())
    return measured


def rate(flood: FloodProcess) -> float:
    with flood.running():
        flood.wait(FLOOD_SECONDS)
        return flood.rate()


def draw(results: Sequence[Measured]) -> Table:
    table = Table(title="A tenant beside another one's flood")
    for heading in ("load", "alone", "beside a flood", "times", "goal", "idle share", "goal", "share beside"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in results:
        beside = statistics.median(one.rate_beside_the_other) / statistics.median(one.rate_by_itself)
        table.add_row(
            one.scenario,
            f"{p95(one.alone) * 1e3:.0f} ms",
            f"{p95(one.beside_the_flood) * 1e3:.0f} ms",
            f"[{'green' if one.times_alone <= MOST_TIMES_ALONE else 'red'}]{one.times_alone:.2f}",
            f"{MOST_TIMES_ALONE:.1f}",
            f"[{'green' if one.idle_share >= LEAST_SHARE else 'red'}]{one.idle_share:.2f}",
            f"{LEAST_SHARE:.1f}",
            f"{beside:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenario", choices=[*SCENARIOS, "all"], default="all")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of B's in a block, alone and beside the flood")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(given.threads), "TINKER_TELEMETRY": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    results = []
    for name in SCENARIOS if given.scenario == "all" else [given.scenario]:
        with tempfile.TemporaryDirectory() as scratch:
            results.append(measure(name, given.blocks, given.requests, Path(scratch)))
    if given.json:
        print(json.dumps([one.as_json() for one in results], indent=2))
    else:
        Console(width=140).print(draw(results))


if __name__ == "__main__":
    main()
