"""The time of a call for each of many adapters, as a multiple of one call of the same tokens, and what adapters cost.

The engine runs in this process, as in a worker on a CPU. A round is one `forward_backward` of one datum for each
adapter; the reference is one call of one adapter with as many datums. Both run in turns. An adapter's memory is the
growth of the process, after a step of each adapter. Parking writes a snapshot to the disk and removes the adapter.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from comparing import Medians, Options, measure_in_turns, parse_options, print_results
from rich.table import Table
from start import resident_mib
from tinsmith_trainer.checkpoints.snapshots import Snapshot, SnapshotFolder
from tinsmith_trainer.engines.base import AdamParams, Datum, LoraSpec, LossSpec, Work
from tinsmith_trainer.engines.peft import PeftEngine, PeftEngineSettings
from tinsmith_trainer.process.output import configure_logs
from tinsmith_trainer.torch_model.loading import load_torch_model
from tinsmith_trainer.torch_model.tiny_model import TinyShape, make_tiny_model
from workloads import ALPHA, BETAS, EPS, LEARNING_RATE, RANK, token_rows

COUNTS = (64, 256)
TOKENS = 64
SHAPE = TinyShape(hidden_size=128, intermediate_size=320, layers=2, heads=4, kv_heads=2)
PARKED = 16
"""The number of adapters that are parked and brought back."""
MIB = 2**20
BYTES_PER_PARAMETER = 12
"""The bytes of weights and moments in float32. Gradients are dropped before the memory is measured."""
ADAM = AdamParams(LEARNING_RATE, BETAS[0], BETAS[1], EPS)


@dataclass(frozen=True, slots=True)
class ManyAdapters:
    """The figures of one number of adapters. Memory is that of one adapter, and so are the seconds of parking."""

    adapters: int
    resident_mib: float
    tensors_mib: float
    seconds: Medians
    optimizer_seconds: float
    park_seconds: float
    return_seconds: float


@dataclass(frozen=True, slots=True)
class Repeated:
    """Calls that are computed together, again and again, without a step of the optimizer."""

    engine: PeftEngine
    works: Sequence[Work]

    def seconds_for_one_of(self, count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            compute_all(self.engine, self.works)
            for work in self.works:
                self.engine.clear_gradients(work.adapter_id)
        return (time.perf_counter() - started) / count


def compute_all(engine: PeftEngine, works: Sequence[Work]) -> None:
    """Compute calls that wait at the same time. As many as the engine allows share a forward."""
    calls = [engine.start(work) for work in works]
    while waiting := [call for call in calls if call.next_tokens]:
        engine.advance(engine.cobatch(waiting))
    for call in calls:
        engine.finish(call)


def calls_of(names: Sequence[str], vocab_size: int, datums: int) -> Sequence[Work]:
    rows = [np.array(row) for row in token_rows(len(names) * datums, TOKENS + 1, vocab_size)]
    built = [Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:]}) for row in rows]
    parts = [built[start : start + datums] for start in range(0, len(built), datums)]
    return [Work(name, part, LossSpec("cross_entropy")) for name, part in zip(names, parts, strict=True)]


def measure(model: Path, count: int, options: Options, scratch: Path) -> ManyAdapters:
    loaded = load_torch_model(str(model), dtype=torch.float32, device="cpu")
    engine = PeftEngine(loaded, PeftEngineSettings(adapter_slots=count + 1))
    names = [f"adapter-{number}" for number in range(count)]
    together = Repeated(engine, calls_of(names, loaded.info.vocab_size, 1))
    engine.create_adapter("one", LoraSpec(RANK, ALPHA, seed=0))
    alone = Repeated(engine, calls_of(["one"], loaded.info.vocab_size, count))
    alone.seconds_for_one_of(1)  # reserves the memory of activations
    before = resident_mib(os.getpid())
    optimizer_seconds = _train_all(engine, names, together.works)
    grown = resident_mib(os.getpid()) - before
    pairs = measure_in_turns(
        alone, together, reference_count=1, served_count=1, blocks=options.blocks, name=f"{count} adapters"
    )
    park_seconds, return_seconds = _parking(engine, names[:PARKED], SnapshotFolder(scratch / f"snapshots-{count}"))
    parameters = sum(int(np.prod(shape)) for shape in engine.adapter_shapes(LoraSpec(RANK, ALPHA, seed=0)).values())
    return ManyAdapters(
        adapters=count,
        resident_mib=grown / count,
        tensors_mib=parameters * BYTES_PER_PARAMETER / MIB,
        seconds=Medians.of(pairs),
        optimizer_seconds=optimizer_seconds,
        park_seconds=park_seconds,
        return_seconds=return_seconds,
    )


def _train_all(engine: PeftEngine, names: Sequence[str], works: Sequence[Work]) -> float:
    """Create the adapters and train each for one step. Returns the seconds of all optimizer steps."""
    for seed, name in enumerate(names):
        engine.create_adapter(name, LoraSpec(RANK, ALPHA, seed=seed))
    compute_all(engine, works)
    return _seconds(lambda: [engine.optim_step(name, ADAM) for name in names])


def _parking(engine: PeftEngine, names: Sequence[str], folder: SnapshotFolder) -> tuple[float, float]:
    """Return the median seconds in which one adapter leaves memory, and in which it returns."""
    parks, returns = [], []
    for name in names:
        started = time.perf_counter()
        file = folder.write(Snapshot(name, 1, engine.state(name), None))
        engine.drop(name)
        parks.append(time.perf_counter() - started)
        started = time.perf_counter()
        engine.load_state(name, folder.read(file).state, with_optimizer=True)
        returns.append(time.perf_counter() - started)
    return statistics.median(parks), statistics.median(returns)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def draw(results: Sequence[ManyAdapters]) -> Table:
    table = Table(title=f"One call of {TOKENS} tokens for each adapter", caption="memory and parking of one adapter")
    for heading in (
        "adapters",
        "memory",
        "tensors",
        "one call",
        "round",
        "ratio",
        "quartiles",
        "steps",
        "park",
        "return",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in results:
        low, high = one.seconds.ratio_quartiles
        table.add_row(
            str(one.adapters),
            *(f"{size:.1f} MiB" for size in (one.resident_mib, one.tensors_mib)),
            *(f"{seconds * 1e3:,.0f} ms" for seconds in (one.seconds.reference, one.seconds.served)),
            f"{one.seconds.ratio:.2f}",
            f"{low:.2f} to {high:.2f}",
            *(f"{seconds * 1e3:,.0f} ms" for seconds in (one.optimizer_seconds, one.park_seconds, one.return_seconds)),
        )
    return table


def main() -> None:
    options = parse_options(__doc__ or "", with_models=False)
    configure_logs("console", "error")  # standard output is only for the figures
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = make_tiny_model(scratch / "model", shape=SHAPE)
        results = [measure(model, count, options, scratch) for count in COUNTS]
    print_results(results, draw, as_json=options.json)


if __name__ == "__main__":
    main()
