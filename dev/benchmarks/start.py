"""The time from `tinsmith serve` to the result of a program's first step, compared with a bare PEFT program.

The bare program imports its packages, loads the model and makes one step. The report also contains the memory of the
server's process at the end. The program starts after the server has printed its URL, because a user would also wait for
the URL.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from comparing import Medians
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sides import API_KEY, MODEL, bare
from tinsmith.local_server import running_server
from tinsmith_trainer.torch_model.tiny_model import TinyShape, make_tiny_model
from workloads import RANK, ROWS, TOKENS, token_rows

GOAL_SECONDS = 6.0
GOAL_MIB = 150
STARTS = 5
SETTLED_SECONDS = 2.0
LAST_MOMENT = "optim_step's result"
# Log lines of the server or its worker: the message, the last part of its logger's name, and its meaning.
LOGGED = (
    ("worker started", "supervisor", "worker's process there"),
    ("engine imported", "startup", "worker has imported its engine"),
    ("worker ready", "startup", "worker has loaded its model"),
    ("worker ready", "supervisor", "server has the worker"),
    ("session created", "", "session created"),
)


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a server: the seconds until each milestone, and the resident memory when the server is idle."""

    moments: dict[str, float]
    resident_mib: float


@dataclass(frozen=True, slots=True)
class Starts:
    """The medians of all starts."""

    seconds: Medians
    moments: dict[str, float]
    resident_mib: float

    @classmethod
    def of(cls, bare_seconds: Sequence[float], starts: Sequence[Start]) -> Starts:
        pairs = [(bare, start.moments[LAST_MOMENT]) for bare, start in zip(bare_seconds, starts, strict=True)]
        moments = {name: statistics.median(one.moments[name] for one in starts) for name in starts[0].moments}
        return cls(Medians.of(pairs), moments, statistics.median(one.resident_mib for one in starts))


def bare_seconds(model: Path) -> float:
    started = time.perf_counter()
    with bare("train", model) as program:
        program.seconds_for_one_of(1)
        return time.perf_counter() - started


def served_start(model: Path, scratch: Path) -> Start:
    """Measure a server on a new data directory. The log of the server is `scratch/server.log`."""
    arguments = [f"--data={scratch / 'data'}", f"--model={MODEL}={model}", "--log-format=json"]
    before = time.time()
    with running_server(arguments, API_KEY, scratch) as base_url:
        moments = {"server answers": time.time() - before}
        said = _run_program(base_url)
        time.sleep(SETTLED_SECONDS)
        resident = resident_mib(_only_child())
    moments |= {name: at - before for name, at in (*_logged(scratch / "server.log"), *said)}
    return Start(dict(sorted(moments.items(), key=lambda moment: moment[1])), resident)


def _run_program(base_url: str) -> list[tuple[str, float]]:
    command = [sys.executable, str(Path(__file__).with_name("start_program.py")), base_url, API_KEY, MODEL, str(RANK)]
    rows = json.dumps(token_rows(ROWS, TOKENS + 1, TinyShape().vocab_size))
    done = subprocess.run(command, input=rows, stdout=subprocess.PIPE, text=True, check=True)
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return [(moment, float(at)) for at, _, moment in lines]


def _logged(log: Path) -> list[tuple[str, float]]:
    found = []
    for line in map(json.loads, log.read_text().splitlines()):
        for event, logger, moment in LOGGED:
            if line["event"] == event and line["logger"].endswith(logger):
                found.append((moment, datetime.fromisoformat(line["timestamp"]).timestamp()))
    return found


def _only_child() -> int:
    """Return the server's PID.

    The server is the only child of this process, because the bare program has ended and the worker is a child of the
    server.
    """
    [child] = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return int(child)


def resident_mib(pid: int) -> float:
    resident = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert resident is not None
    return int(resident[1]) / 1024


def measure(count: int) -> Starts:
    """Measure both sides in turns, after one unmeasured start of each side that fills the page cache."""
    pairs = []
    for _ in track(range(count + 1), "starts", console=Console(stderr=True), transient=True):
        with tempfile.TemporaryDirectory() as scratch:
            model = make_tiny_model(Path(scratch) / "model")
            pairs.append((bare_seconds(model), served_start(model, Path(scratch))))
    without, served = zip(*pairs[1:], strict=True)
    return Starts.of(without, served)


def draw(result: Starts) -> Table:
    low, high = result.seconds.ratio_quartiles
    table = Table(title="The first step of a first program")
    table.add_column("since `tinsmith serve`", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    for name, seconds in result.moments.items():
        table.add_row(name, f"{seconds:.2f} s")
    table.add_section()
    table.add_row(f"the same, goal {GOAL_SECONDS:g} s", _judged(result.seconds.served, GOAL_SECONDS, " s"))
    table.add_row("bare PEFT program", f"{result.seconds.reference:.2f} s")
    table.add_row("ratio, quartiles", f"{result.seconds.ratio:.2f}, {low:.2f} to {high:.2f}")
    table.add_row(f"server's memory at rest, goal {GOAL_MIB} MiB", _judged(result.resident_mib, GOAL_MIB, " MiB"))
    return table


def _judged(figure: float, goal: float, unit: str) -> str:
    return f"[{'green' if figure <= goal else 'red'}]{figure:.1f}{unit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=STARTS, help="of each side")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, on each side")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": str(options.threads),
        "TINKER_TELEMETRY": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    result = measure(options.starts)
    if options.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        Console().print(draw(result))


if __name__ == "__main__":
    main()
