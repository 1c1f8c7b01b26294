"""Tinsmith beside another server of the Tinker API on one machine: tokens per second of one, four and eight adapters.

The peer runs already, on the model at `--model`, under its own name of it; its programs run in its own Python, with the
SDK that it speaks. Tinsmith is started with defaults. The sides take turns, and the first turn of each, in which a peer
may compile, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tinsmith.local_server import running_server

API_KEY = "tml-benchmark-0123456789"
GOALS = {1: 1.3, 4: 1.3, 8: 1.1}
SAMPLING_GOAL = 1.5
TURNS = 3


@dataclass(frozen=True, slots=True)
class Program:
    """Of one side: its Python, where its server is, and what it calls the model."""

    python: str
    url: str
    model: str

    def run(self, adapters: int) -> Rates:
        command = [self.python, str(Path(__file__).with_name("peer_program.py")), self.url, self.model, str(adapters)]
        environment = {**os.environ, "TINKER_API_KEY": API_KEY, "TINKER_TELEMETRY": "0"}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        return Rates(**json.loads(done.stdout.splitlines()[-1]))


@dataclass(frozen=True, slots=True)
class Rates:
    trained_per_second: float
    sampled_per_second: float


@dataclass(frozen=True, slots=True)
class Comparison:
    what: str
    peer: float
    ours: float
    goal: float

    @property
    def ratio(self) -> float:
        return self.ours / self.peer


def compare(peer: Program, ours: Program, turns: int) -> list[Comparison]:
    found, sampled = [], list[tuple[Rates, Rates]]()
    for adapters, goal in GOALS.items():
        pairs = [(peer.run(adapters), ours.run(adapters)) for _ in track(range(turns + 1), f"{adapters} at once")][1:]
        theirs, own = ([side.trained_per_second for side in sides] for sides in zip(*pairs, strict=True))
        found.append(
            Comparison(f"trained, {adapters} at once", statistics.median(theirs), statistics.median(own), goal)
        )
        sampled += pairs
    theirs, own = ([side.sampled_per_second for side in sides] for sides in zip(*sampled, strict=True))
    return [*found, Comparison("sampled, 8 x 32", statistics.median(theirs), statistics.median(own), SAMPLING_GOAL)]


def draw(results: Sequence[Comparison]) -> Table:
    table = Table(title="Tokens per second")
    for heading in ("", "peer", "Tinsmith", "ratio", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in results:
        colour = "green" if one.ratio >= one.goal else "red"
        table.add_row(one.what, f"{one.peer:.0f}", f"{one.ours:.0f}", f"[{colour}]{one.ratio:.2f}", f"{one.goal:.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-url", required=True)
    parser.add_argument("--peer-python", required=True, help="with the SDK that the peer speaks")
    parser.add_argument("--peer-model", required=True, help="what the peer calls the model")
    parser.add_argument("--model", type=Path, required=True, help="the model's directory")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [f"--data={scratch}/data", f"--model=bench/tiny={given.model.resolve()}", "--log-level=warning"]
        with running_server(arguments, API_KEY, Path(scratch)) as url:
            ours = Program(sys.executable, url, "bench/tiny")
            results = compare(Program(given.peer_python, given.peer_url, given.peer_model), ours, given.turns)
    if given.json:
        print(json.dumps([asdict(one) | {"ratio": one.ratio} for one in results], indent=2))
    else:
        Console().print(draw(results))


if __name__ == "__main__":
    main()
