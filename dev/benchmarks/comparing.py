"""Measurements in turns, the medians of measurements, and other code that the benchmark programs share."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers.utils import logging as transformers_logging
from workloads import WORKLOADS, Workload

BLOCKS = 30

Pair = tuple[float, float]


class Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


Result = TypeVar("Result", bound=Dataclass)


class Side(Protocol):
    """One side of a comparison: the reference or the served program."""

    def seconds_for_one_of(self, count: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Medians:
    """The medians over the blocks. `ratio` is the served time divided by the reference time.

    The quartiles are the quartiles of the ratios of single blocks.
    """

    reference: float
    served: float
    ratio: float
    ratio_quartiles: tuple[float, float]

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Medians:
        reference, served = (statistics.median(side) for side in zip(*pairs, strict=True))
        low, _, high = statistics.quantiles([served / reference for reference, served in pairs], n=4)
        return cls(reference, served, served / reference, (low, high))


def measure_in_turns(
    reference: Side, served: Side, *, reference_count: int, served_count: int, blocks: int, name: str
) -> list[Pair]:
    """Return the seconds of one step, as a pair (reference, served) for each block.

    The two sides run in turns, so that other load on the machine affects both sides equally.
    """
    reference.seconds_for_one_of(reference_count)
    served.seconds_for_one_of(served_count)
    return [
        (reference.seconds_for_one_of(reference_count), served.seconds_for_one_of(served_count))
        for _ in track(range(blocks), name, console=Console(stderr=True), transient=True)
    ]


@dataclass(frozen=True, slots=True)
class Options:
    """The command-line options that all benchmarks share."""

    workloads: Sequence[Workload]
    blocks: int
    threads: int
    json: bool


def parse_options(description: str, *, with_models: bool = True) -> Options:
    """Parse the options, and set the number of PyTorch threads for all processes that are started later."""
    parser = argparse.ArgumentParser(description=description)
    if with_models:
        parser.add_argument("--model", choices=[*WORKLOADS, "all"], default="all", help="by its parameters")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="measurements of each side")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, on each side")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": str(arguments.threads),
        "TINKER_TELEMETRY": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    transformers_logging.disable_progress_bar()
    model = getattr(arguments, "model", "all")
    workloads = list(WORKLOADS.values()) if model == "all" else [WORKLOADS[model]]
    return Options(workloads, arguments.blocks, arguments.threads, arguments.json)


def print_results(results: Sequence[Result], draw: Callable[[Sequence[Result]], Table], *, as_json: bool) -> None:
    """Print the results as JSON for programs, or as a table for readers."""
    if as_json:
        print(json.dumps([asdict(one) for one in results], indent=2))
    else:
        Console().print(draw(results))
