"""What ranks, Ray and a switch between adapters cost the nemo-rl engine on the CPU, each as a ratio of step times."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from comparing import Medians, Options, measure_in_turns, parse_options
from rich.console import Console
from rich.table import Table
from sides import Bare
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from workloads import ROWS, TOKENS, Workload


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two ways to do one step, by the arguments of `engine_steps.py`."""

    name: str
    reference: Sequence[str]
    measured: Sequence[str]


COMPARISONS = (
    Comparison("Megatron beside the PEFT engine", ["peft"], ["nemo-rl"]),
    Comparison("another adapter in each step", ["nemo-rl"], ["nemo-rl", "--adapters=2"]),
    Comparison("a rank behind Ray, not in the process", ["nemo-rl"], ["nemo-rl:ranks=1"]),
    Comparison("two ranks that share the data, not one", ["nemo-rl:ranks=1"], ["nemo-rl:ranks=2"]),
)


@dataclass(frozen=True, slots=True)
class StepTime:
    comparison: str
    parameters: str
    seconds: Medians


def measure(comparison: Comparison, workload: Workload, options: Options, model: Path) -> StepTime:
    with steps(comparison.reference, model) as reference, steps(comparison.measured, model) as measured:
        pairs = measure_in_turns(
            reference,
            measured,
            reference_count=workload.steps_per_block,
            served_count=workload.steps_per_block,
            blocks=options.blocks,
            name=comparison.name,
        )
    return StepTime(comparison.name, workload.name, Medians.of(pairs))


@contextmanager
def steps(arguments: Sequence[str], model: Path) -> Iterator[Bare]:
    engine, *more = arguments
    program = str(Path(__file__).with_name("engine_steps.py"))
    command = [sys.executable, "-W", "ignore", program, engine, str(model), *more]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Bare(process)


def draw(results: Sequence[StepTime], threads: int) -> Table:
    table = Table(title=f"One training step of {ROWS} x {TOKENS} tokens, threads: {threads}")
    table.add_column("what")
    for heading in ("model", "reference", "measured", "ratio", "quartiles"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in results:
        low, high = one.seconds.ratio_quartiles
        table.add_row(
            one.comparison,
            one.parameters,
            f"{one.seconds.reference * 1e3:.1f} ms",
            f"{one.seconds.served * 1e3:.1f} ms",
            f"{one.seconds.ratio:.2f}",
            f"{low:.2f} to {high:.2f}",
        )
    return table


def main() -> None:
    options = parse_options(__doc__ or "")
    results = []
    for workload in options.workloads:
        with tempfile.TemporaryDirectory() as scratch:
            model = make_tiny_model(Path(scratch), shape=workload.shape)
            results += [measure(comparison, workload, options, model) for comparison in COMPARISONS]
    if options.json:
        print(json.dumps([asdict(one) for one in results], indent=2))
    else:
        Console().print(draw(results, options.threads))


if __name__ == "__main__":
    main()
