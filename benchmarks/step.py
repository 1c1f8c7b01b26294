"""The time of a training step through SDK and server, as a multiple of the same step in a bare PEFT loop.

Both sides train in turns, a few steps at a time, so that whatever else the machine does hits both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from sides import bare_loop, served_loop
from tinsmith_trainer.tiny_model import make_tiny_model
from transformers.utils import logging as transformers_logging
from workloads import LARGE, ROWS, SMALL, TOKENS, Workload

BLOCKS = 30
WARM_UP_STEPS = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over the blocks, in seconds per step; `ratio_quartiles` are of the blocks' own ratios."""

    model: str
    threads: int
    blocks: int
    steps_per_block: int
    bare_seconds: float
    served_seconds: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    goal: float


def compare(workload: Workload, scratch: Path, *, blocks: int, threads: int, console: Console) -> Comparison:
    directory = make_tiny_model(scratch / "model", shape=workload.shape)
    with bare_loop(directory) as bare, served_loop(directory, workload, scratch) as served:
        for side in (bare, served):
            side.seconds_per_step(WARM_UP_STEPS)
        steps = workload.steps_per_block
        pairs = [
            (bare.seconds_per_step(steps), served.seconds_per_step(steps))
            for _ in track(range(blocks), f"{workload.name} parameters", console=console, transient=True)
        ]
    return _summarize(workload, pairs, threads)


def _summarize(workload: Workload, pairs: Sequence[tuple[float, float]], threads: int) -> Comparison:
    bare, served = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    low, _, high = statistics.quantiles([served / bare for bare, served in pairs], n=4)
    return Comparison(
        model=workload.name,
        threads=threads,
        blocks=len(pairs),
        steps_per_block=workload.steps_per_block,
        bare_seconds=bare,
        served_seconds=served,
        ratio=served / bare,
        ratio_quartiles=(low, high),
        goal=workload.goal,
    )


def draw_table(comparisons: Sequence[Comparison]) -> Table:
    table = Table(title=f"One training step, {ROWS} x {TOKENS} tokens, medians")
    for heading in ("parameters", "threads", "bare PEFT loop", "SDK and server", "ratio", "middle half", "goal"):
        table.add_column(heading, justify="left" if heading == "parameters" else "right")
    for one in comparisons:
        low, high = one.ratio_quartiles
        table.add_row(
            one.model,
            str(one.threads),
            f"{one.bare_seconds * 1e3:.1f} ms",
            f"{one.served_seconds * 1e3:.1f} ms",
            f"[{'green' if one.ratio <= one.goal else 'red'}]{one.ratio:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{one.goal:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="measurements per side and model")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, on each side")
    parser.add_argument("--model", choices=("3M", "30M", "both"), default="both")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    # Read by the processes that this one starts; it computes nothing itself.
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "TINKER_TELEMETRY": "0"}
    transformers_logging.disable_progress_bar()
    chosen = {"3M": (SMALL,), "30M": (LARGE,), "both": (SMALL, LARGE)}[options.model]
    console = Console(stderr=True)
    comparisons = []
    for workload in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            comparisons.append(
                compare(workload, Path(scratch), blocks=options.blocks, threads=options.threads, console=console)
            )
    if options.json:
        print(json.dumps([asdict(one) for one in comparisons], indent=2))
    else:
        Console().print(draw_table(comparisons))


if __name__ == "__main__":
    main()
