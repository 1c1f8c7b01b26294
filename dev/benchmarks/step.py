"""The time of a training step through SDK and server, as a multiple of the same step in a bare PEFT loop."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comparing import Medians, Options, measure_in_turns, parse_options, print_results
from rich.table import Table
from sides import ServedSteps, bare, training_client
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from workloads import ROWS, TOKENS, Workload


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of a step with one model."""

    parameters: str
    threads: int
    seconds: Medians
    goal: float


def measure(workload: Workload, options: Options, scratch: Path) -> StepTime:
    model = make_tiny_model(scratch / "model", shape=workload.shape)
    with bare("train", model) as reference, training_client(model, scratch) as client:
        pairs = measure_in_turns(
            reference,
            ServedSteps(client, workload.shape.vocab_size),
            reference_count=workload.steps_per_block,
            served_count=workload.steps_per_block,
            blocks=options.blocks,
            name=f"{workload.name} parameters",
        )
    return StepTime(workload.name, options.threads, Medians.of(pairs), workload.goal)


def draw(results: Sequence[StepTime]) -> Table:
    table = Table(title=f"One training step of {ROWS} x {TOKENS} tokens, threads: {results[0].threads}")
    for heading in ("model", "bare PEFT loop", "SDK and server", "ratio", "quartiles", "goal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in results:
        low, high = one.seconds.ratio_quartiles
        table.add_row(
            one.parameters,
            f"{one.seconds.reference * 1e3:.1f} ms",
            f"{one.seconds.served * 1e3:.1f} ms",
            f"[{'green' if one.seconds.ratio <= one.goal else 'red'}]{one.seconds.ratio:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{one.goal:.2f}",
        )
    return table


def main() -> None:
    options = parse_options(__doc__ or "")
    results = []
    for workload in options.workloads:
        with tempfile.TemporaryDirectory() as scratch:
            results.append(measure(workload, options, Path(scratch)))
    print_results(results, draw, as_json=options.json)


if __name__ == "__main__":
    main()
