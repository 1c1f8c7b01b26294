"""What a program waits for its model on a warm worker, session and all, as a multiple of what the SDK takes for it.

The reference is the same program with a server that knows its answers by heart. Both in turns, each model in a session
of its own that ends when the model is there.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from comparing import Medians, measure_in_turns, parse_options
from fairness_requests import make_a_model
from fairness_scenarios import MODEL, SHAPE
from rich.console import Console
from rich.table import Table
from sides import API_KEY
from tinsmith.local_server import running_server
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

GOAL_SECONDS = 0.1
MODELS_A_BLOCK = 5


@dataclass(slots=True)
class Making:
    """Models of one server."""

    url: str
    seconds: list[float] = field(default_factory=list)

    def seconds_for_one_of(self, count: int) -> float:
        taken = [make_a_model(self.url, API_KEY) for _ in range(count)]
        self.seconds += taken
        return statistics.median(taken)


@dataclass(frozen=True, slots=True)
class Created:
    """Seconds for a model: medians of blocks, and the 95th percentile of all models behind the first block."""

    medians: Medians
    reference_p95: float
    served_p95: float


@contextmanager
def canned_server() -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("canned_server.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()


def measure(blocks: int, scratch: Path) -> Created:
    model = make_tiny_model(scratch / "model", shape=SHAPE)
    arguments = [f"--data={scratch / 'data'}", f"--model={MODEL}={model}", "--log-level=warning"]
    with running_server(arguments, API_KEY, scratch) as url, canned_server() as canned_url:
        reference, served = Making(canned_url), Making(url)
        pairs = measure_in_turns(
            reference,
            served,
            reference_count=MODELS_A_BLOCK,
            served_count=MODELS_A_BLOCK,
            blocks=blocks,
            name="models",
        )
    return Created(Medians.of(pairs), _p95(reference.seconds), _p95(served.seconds))


def _p95(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds[MODELS_A_BLOCK:], n=20, method="inclusive")[-1]


def draw(result: Created) -> Table:
    low, high = result.medians.ratio_quartiles
    table = Table(title="create_lora_training_client on a warm worker, session and all")
    for heading in ("", "the SDK alone", "served", "ratio", "quartiles", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row(
        "p50",
        f"{1e3 * result.medians.reference:.0f} ms",
        f"{1e3 * result.medians.served:.0f} ms",
        f"{result.medians.ratio:.2f}",
        f"{low:.2f} to {high:.2f}",
        "",
    )
    table.add_row(
        "p95",
        f"{1e3 * result.reference_p95:.0f} ms",
        f"[{'green' if result.served_p95 <= GOAL_SECONDS else 'red'}]{1e3 * result.served_p95:.0f} ms",
        f"{result.served_p95 / result.reference_p95:.2f}",
        "",
        f"{1e3 * GOAL_SECONDS:.0f} ms",
    )
    return table


def main() -> None:
    options = parse_options(__doc__ or "", with_models=False)
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(options.blocks, Path(scratch))
    if options.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        Console().print(draw(result))


if __name__ == "__main__":
    main()
