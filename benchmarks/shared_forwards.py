"""What short datums and many adapters cost the engine: by themselves, in company, and beside full microbatches.

The engine alone, in this process. Eight adapters compute one call each: one call after the other, and all of them under
way at once, so that they share what forwards they can. Then one adapter computes calls of other lengths; the reference
is the same number of tokens as 8 x 128, which are one microbatch without padding. Times are the processor's, in which
other programs of the machine have less part than in the clock's.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from bare import gradients_sorted_by_length, load
from comparing import Medians, Options, Pair, parse_options
from rich.console import Console
from rich.table import Table
from tinsmith_trainer.engines.base import Datum, LoraSpec, LossSpec, Work
from tinsmith_trainer.engines.peft.engine import PeftEngine
from tinsmith_trainer.engines.peft.settings import PeftEngineSettings
from tinsmith_trainer.torch_model.loading import load_torch_model
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from workloads import ALPHA, RANK, ROWS, TOKENS, Workload

ADAPTERS = [f"adapter-{number}" for number in range(8)]
LENGTHS_SEED = 7
RAGGED = "64 datums of 16 to 512, log-uniform"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ratio`: how many times as fast as the reference, in tokens a second."""

    model: str
    what: str
    reference: str
    ratio: float
    quartiles: tuple[float, float]
    goal: float


class Bench:
    def __init__(self, workload: Workload, folder: Path, blocks: int) -> None:
        self._model = workload.name
        self._folder = make_tiny_model(folder, shape=workload.shape)
        self._blocks = blocks
        self._engine = PeftEngine(load_torch_model(str(self._folder)), PeftEngineSettings())
        for seed, adapter in enumerate(ADAPTERS):
            self._engine.create_adapter(adapter, LoraSpec(RANK, ALPHA, seed))
        self._draw = np.random.default_rng(0)

    def company(self, what: str, lengths: Sequence[Sequence[int]], goal: float) -> Comparison:
        """All adapters at once, beside one after the other. `lengths`: of each one's datums."""
        works = [self._work(adapter, own) for adapter, own in zip(ADAPTERS, lengths, strict=True)]
        pairs = [(self._one_by_one(works), self._at_once(works)) for _ in range(self._blocks + 1)][1:]
        return self._compared(f"8 adapters of {what} at once", "one after the other", pairs, goal)

    def beside_sorted(self, what: str, lengths: Sequence[int], goal: float) -> Comparison:
        """One adapter's call, beside a loop that sorts by length, pads, and has as many tokens in a batch."""
        work = self._work(ADAPTERS[0], lengths)
        loop = gradients_sorted_by_length(load(self._folder), lengths, ROWS * TOKENS)
        pairs = [(seconds_of(lambda: loop(1)), self._one_by_one([work])) for _ in range(self._blocks + 1)][1:]
        return self._compared(what, "bare PEFT, sorted by length", pairs, goal)

    def lengths(self, what: str, lengths: Sequence[int], goal: float) -> Comparison:
        """One adapter's call, beside as many tokens of full microbatches."""
        work, full = self._work(ADAPTERS[0], lengths), self._work(ADAPTERS[0], [TOKENS] * ROWS)
        share = sum(lengths) / (ROWS * TOKENS)
        pairs = [(share * self._one_by_one([full]), self._one_by_one([work])) for _ in range(self._blocks + 1)][1:]
        return self._compared(what, f"{ROWS} x {TOKENS}", pairs, goal)

    def _compared(self, what: str, reference: str, pairs: Sequence[Pair], goal: float) -> Comparison:
        medians = Medians.of(pairs)
        low, high = medians.ratio_quartiles
        return Comparison(self._model, what, reference, 1 / medians.ratio, (1 / high, 1 / low), goal)

    def _work(self, adapter: str, lengths: Sequence[int]) -> Work:
        ids = self._engine.base_model().vocab_size
        datums = [
            Datum(
                self._draw.integers(0, ids, length).astype(np.int32),
                {"target_tokens": self._draw.integers(0, ids, length)},
            )
            for length in lengths
        ]
        return Work(adapter, datums, LossSpec("cross_entropy"))

    def _one_by_one(self, works: Sequence[Work]) -> float:
        return sum(seconds_of(lambda work=work: self._compute([work])) for work in works)

    def _at_once(self, works: Sequence[Work]) -> float:
        return seconds_of(lambda: self._compute(works))

    def _compute(self, works: Sequence[Work]) -> None:
        calls = [self._engine.start(work) for work in works]
        while left := [call for call in calls if call.next_tokens]:
            self._engine.advance(self._engine.together(left))
        for call in calls:
            self._engine.finish(call)


def seconds_of(compute: Callable[[], None]) -> float:
    started = time.process_time()
    compute()
    return time.process_time() - started


def measure(workload: Workload, folder: Path, options: Options) -> list[Comparison]:
    bench = Bench(workload, folder, options.blocks)
    drawn = np.random.default_rng(LENGTHS_SEED)
    log_uniform = [int(length) for length in np.exp(drawn.uniform(np.log(16), np.log(512), 64))]
    return [
        bench.company("1 x 16", [[16]] * 8, goal=2.5),
        bench.company("1 x 64", [[64]] * 8, goal=0.97),
        bench.company("a datum of 16 to 120 each", [[length] for length in range(16, 128, 14)], goal=0.97),
        bench.company(f"{ROWS} x {TOKENS}", [[TOKENS] * ROWS] * 8, goal=0.97),
        bench.lengths("64 datums of 16", [16] * 64, goal=0.8),
        bench.lengths(RAGGED, log_uniform, goal=0.9),
        bench.beside_sorted(RAGGED, log_uniform, goal=1.0),
    ]


def draw(results: Sequence[Comparison], threads: int) -> Table:
    table = Table(title=f"Tokens per second, threads: {threads}")
    for heading in ("model", "measured", "reference", "times", "quartiles", "goal"):
        table.add_column(heading, no_wrap=True)
    for one in results:
        colour = "green" if one.ratio >= one.goal else "red"
        quartiles = " to ".join(f"{quartile:.2f}" for quartile in one.quartiles)
        table.add_row(one.model, one.what, one.reference, f"[{colour}]{one.ratio:.2f}", quartiles, f"{one.goal:.2f}")
    return table


def main() -> None:
    options = parse_options(__doc__.partition("\n")[0])
    torch.set_num_threads(options.threads)
    results: list[Comparison] = []
    for workload in options.workloads:
        with tempfile.TemporaryDirectory() as folder:
            results += measure(workload, Path(folder), options)
    if options.json:
        print(json.dumps([asdict(one) for one in results], indent=2))
    else:
        Console(width=130).print(draw(results, options.threads))


if __name__ == "__main__":
    main()
