"""Tinsmith compared with SkyRL, another server of the Tinker API: tokens per second of one, four and eight adapters.

The programs of each side run in a separate Python environment, with the SDK version that the side's server supports.
Both servers run with default settings on the same model. The sides take turns. The first steps of each program do not
count, because SkyRL compiles during these steps.
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
from skyrl_server import MODEL as PEERS_MODEL
from skyrl_server import VERSION, installed_python, running_skyrl
from testcluster.ports import free_port
from tinsmith.local_server import running_server
from tinsmith_trainer.torch_model.tiny_model import TinyShape, make_tiny_model

API_KEY = "tml-benchmark-0123456789"
GOALS = {1: 1.3, 4: 1.3, 8: 1.1}
SAMPLING_GOAL = 1.5
TURNS = 2
SHAPE = TinyShape(vocab_size=51_200, max_sequence_length=2048, tied_embeddings=True)
"""A model of 3.35 million parameters, mostly in the embedding of the vocabulary."""
MODEL = "bench/tiny"


@dataclass(frozen=True, slots=True)
class Program:
    """The program of one side: the Python interpreter, the server's address, and the server's name for the model."""

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
    tinsmith: float
    goal: float

    @property
    def ratio(self) -> float:
        return self.tinsmith / self.peer


def compare(model: Path, counts: Sequence[int], turns: int, scratch: Path) -> list[Comparison]:
    found, sampled = [], list[tuple[Rates, Rates]]()
    for adapters in counts:
        pairs = _in_turns(model, adapters, turns, scratch / str(adapters))
        peers, tinsmith = ([side.trained_per_second for side in sides] for sides in zip(*pairs, strict=True))
        found.append(_comparison(f"trained, {adapters} at once", peers, tinsmith, GOALS[adapters]))
        sampled += pairs
    peers, tinsmith = ([side.sampled_per_second for side in sides] for sides in zip(*sampled, strict=True))
    return [*found, _comparison("sampled, 8 x 32", peers, tinsmith, SAMPLING_GOAL)]


def _in_turns(model: Path, adapters: int, turns: int, scratch: Path) -> list[tuple[Rates, Rates]]:
    scratch.mkdir()
    arguments = [f"--data={scratch}/data", f"--model={MODEL}={model}", "--log-level=warning"]
    with running_server(arguments, API_KEY, scratch) as url:
        tinsmith = Program(sys.executable, url, MODEL)
        both = track(range(turns), f"{adapters} at once", console=Console(stderr=True))
        return [(_peers_rates(model, adapters, scratch / f"peer-{turn}"), tinsmith.run(adapters)) for turn in both]


def _peers_rates(model: Path, adapters: int, scratch: Path) -> Rates:
    """Measure a SkyRL server with slots for exactly this number of adapters.

    Unused slots slow each step down, and SkyRL never frees a slot.
    """
    python = installed_python()
    with running_skyrl(python, model, port=free_port(), adapters=adapters, scratch=scratch) as url:
        return Program(str(python), url, PEERS_MODEL).run(adapters)


def _comparison(what: str, peers: Sequence[float], tinsmith: Sequence[float], goal: float) -> Comparison:
    return Comparison(what, statistics.median(peers), statistics.median(tinsmith), goal)


def draw(results: Sequence[Comparison]) -> Table:
    table = Table(title=f"Tokens per second against SkyRL {VERSION}")
    for heading in ("", "SkyRL", "Tinsmith", "ratio", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in results:
        colour = "green" if one.ratio >= one.goal else "red"
        table.add_row(
            one.what, f"{one.peer:.0f}", f"{one.tinsmith:.0f}", f"[{colour}]{one.ratio:.2f}", f"{one.goal:.1f}"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--adapters", type=int, nargs="+", choices=GOALS, default=list(GOALS), help="at once")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny_model(Path(scratch) / "model", shape=SHAPE)
        results = compare(model, options.adapters, options.turns, Path(scratch))
    if options.json:
        print(json.dumps([asdict(one) | {"ratio": one.ratio} for one in results], indent=2))
    else:
        Console().print(draw(results))


if __name__ == "__main__":
    main()
