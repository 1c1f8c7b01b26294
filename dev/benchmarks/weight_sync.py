"""The time from new weights in the trainer to the first sample from them: the call, the checkpoint, and the load.

The unmodified SDK uses a server that samples in one of four places. The sampler may run in the worker's process, or in
another process on the same machine that shares memory. The sampler may also run in a pool, which reads the checkpoint
root or gets the saves from the worker as a stream. All processes run on one machine, without encryption. The reference
is a copy of the adapter's file in the same folder, synced to disk. The report also contains the processor seconds of
each side, because on a busy machine, several processes get a larger share of the processors than one.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import grpc
import psutil
import tinker
from api_replica import API_KEY, MODEL
from api_sides import installation
from comparing import Medians, Pair, parse_options
from rich.console import Console
from rich.table import Table
from sides import step_datum
from tinker import types
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
from tinsmith_trainer.torch_model.tiny_model import TinyShape, make_tiny_model
from workloads import LEARNING_RATE, RANK, token_rows

SHAPE = TinyShape(hidden_size=2048, intermediate_size=4096, layers=2, heads=16, kv_heads=8)
LARGE_RANK = 1408
"""The rank of an adapter of 370 MB. The model is small compared with the adapter.

On a small model, a sample takes only a small part of the measured time.
"""

PROMPT = types.ModelInput.from_ints(list(token_rows(1, 8, SHAPE.vocab_size)[0]))
ONE_TOKEN = types.SamplingParams(max_tokens=1, temperature=1.0, stop=[])
FLAGS = ["--max-rank", str(LARGE_RANK), "--no-deterministic-sampling", "--adapter-slots", "4"]
STEP_DATUM = step_datum(token_rows(1, 33, SHAPE.vocab_size)[0])


Place = Literal["own", "shared", "pool", "root"]
"""The four places in which the sampler may run."""
PLACES: Sequence[tuple[Place, str, float]] = (
    ("own", "the worker's own sampler", 1.2),
    ("shared", "a sampler next to the worker", 1.5),
    ("pool", "a sampler of a pool, by stream", 1.5),
    ("root", "one of a pool, by the root", 1.5),
)
WAYS = {"own": "own", "shared": "shared", "pool": "stream", "root": "root"}
"""The way in which the sampler in each place must load every adapter.

If an adapter is loaded in another way, the measurement is invalid.
"""
STREAMING = ["--offered-saves-bytes", str(1024**3)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The medians of the seconds of both sides, and the ratio.

    The quartiles are the quartiles of the ratios of neighbouring measurements.

    `goal`: the largest ratio that is acceptable; None: no goal.
    """

    measured: str
    seconds: float
    reference: str
    reference_seconds: float
    ratio: float
    quartiles: tuple[float, float]
    goal: float | None


@dataclass(frozen=True, slots=True)
class Programs:
    """Two clients: the first has the large adapter, and the second trains at the same time.

    `root`: the folder of the checkpoint root.
    """

    large: tinker.TrainingClient
    other: tinker.TrainingClient
    root: Path
    processes: Sequence[psutil.Process]

    def processor_seconds(self) -> float:
        """Return the processor seconds of server, worker and sampler so far."""
        times = [process.cpu_times() for process in self.processes]
        return sum(each.user + each.system for each in times)


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@contextmanager
def programs(scratch: Path, model: Path, place: Place) -> Iterator[Programs]:
    shared = ["--saves-socket", str(scratch / "saves.sock")] if place == "shared" else []
    engine = ["--model", str(model), *FLAGS, *shared]
    of_worker = [*engine, *(STREAMING if place == "pool" else [])]
    with installation(scratch, 1, None, of_worker, sampler=None if place == "own" else engine) as running:
        services = [tinker.ServiceClient(base_url=running.urls[0], api_key=API_KEY) for _ in range(2)]
        large, other = (
            service.create_lora_training_client(base_model=MODEL, rank=rank).result()
            for service, rank in zip(services, (LARGE_RANK, RANK), strict=True)
        )
        pids = [running.worker_pid, *running.pids, *filter(None, [running.sampler_pid])]
        yield Programs(large, other, scratch / "root", [psutil.Process(pid) for pid in pids])
        for service in services:
            service.close("success").result()
        taken = ways_taken(running.socket if place == "own" else running.socket.with_name("sampler.sock"))
        assert taken == {WAYS[place]}, taken


def ways_taken(socket: Path) -> set[str]:
    """Return the ways in which the sampler at this socket has loaded adapters."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        described = worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest())
    return set(described.metrics.adapters_taken)


def sync(running: Programs) -> tinker.SamplingClient:
    """Save the weights, and draw one sample from the save."""
    sampler = running.large.save_weights_and_get_sampling_client().result()
    draw(sampler)
    return sampler


def saved_files(root: Path) -> Sequence[Path]:
    """Return the saved files, newest first."""
    return sorted(root.rglob("adapter_model.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True)


def make_room(root: Path) -> None:
    """Delete old saves, so that a run does not fill the disk."""
    for older in saved_files(root)[1:]:
        older.unlink()


def draw(sampler: tinker.SamplingClient) -> None:
    [sequence] = sampler.sample(PROMPT, 1, ONE_TOKEN).result().sequences
    assert len(sequence.tokens) == 1


def copy_synced(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())


def measure_syncs(running: Programs, blocks: int, name: str, goal: float) -> Iterator[Comparison]:
    sampler = sync(running)
    size = f"{saved_files(running.root)[0].stat().st_size / 1e6:.0f} MB"
    by_clock, by_processor, alone = list[Pair](), list[Pair](), list[Pair]()
    for _ in range(blocks):
        copy = partial(copy_synced, saved_files(running.root)[0], running.root / "copied")
        copied, of_copy = spent(copy, time.process_time)
        synced, of_sync = spent(lambda: sync(running), running.processor_seconds)
        by_clock.append((copied, synced))
        by_processor.append((of_copy, of_sync))
        alone.append((copied, seconds_of(lambda: draw(sampler))))
        make_room(running.root)
    yield compared(f"{size} to {name}", f"a copy of {size}", by_clock, goal)
    yield compared("the same by processors", f"a copy of {size}", by_processor, None)
    yield compared("of it a sample alone", f"a copy of {size}", alone, None)


def spent(call: Callable[[], object], processor_seconds: Callable[[], float]) -> tuple[float, float]:
    """Return the elapsed seconds and the processor seconds."""
    before = processor_seconds()
    seconds = seconds_of(call)
    return seconds, processor_seconds() - before


def measure_step(running: Programs, blocks: int, name: str) -> Comparison:
    step(running.other)
    pairs = [
        (seconds_of(lambda: step(running.other)), during_syncs(running, lambda: step(running.other)))
        for _ in range(blocks)
    ]
    return compared(f"another model's step during syncs to {name}", "without", pairs, 1 / 0.9)


def step(client: tinker.TrainingClient) -> None:
    adam = types.AdamParams(learning_rate=LEARNING_RATE)
    futures = client.forward_backward([STEP_DATUM], "cross_entropy"), client.optim_step(adam)
    for future in futures:
        future.result()


def during_syncs(running: Programs, measured: Callable[[], None]) -> float:
    stop = threading.Event()

    def sync_until_stopped() -> None:
        while not stop.is_set():
            sync(running)
            make_room(running.root)

    syncing = threading.Thread(target=sync_until_stopped)
    syncing.start()
    try:
        return seconds_of(measured)
    finally:
        stop.set()
        syncing.join()


def compared(measured: str, reference: str, pairs: Sequence[Pair], goal: float | None) -> Comparison:
    medians = Medians.of(pairs)
    return Comparison(
        measured, medians.served, reference, medians.reference, medians.ratio, medians.ratio_quartiles, goal
    )


def table_of(results: Sequence[Comparison]) -> Table:
    table = Table(title="Weights, from the trainer to the first sample")
    for heading in ("measured", "s", "reference", "s", "times", "quartiles", "goal"):
        table.add_column(heading, no_wrap=True)
    for one in results:
        colour = "white" if one.goal is None else "green" if one.ratio <= one.goal else "red"
        quartiles = " to ".join(f"{quartile:.2f}" for quartile in one.quartiles)
        seconds = (f"{one.seconds:.2f}", f"{one.reference_seconds:.2f}")
        row = (one.measured, seconds[0], one.reference, seconds[1], f"[{colour}]{one.ratio:.2f}", quartiles)
        table.add_row(*row, "" if one.goal is None else f"{one.goal:.2f}")
    return table


def main() -> None:
    options = parse_options(__doc__.partition("\n")[0], with_models=False)
    results: list[Comparison] = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = make_tiny_model(scratch / "model", shape=SHAPE)
        for place, name, goal in PLACES:
            with programs(scratch / place, model, place) as running:
                results += measure_syncs(running, options.blocks, name, goal)
                results.append(measure_step(running, options.blocks, name))
    if options.json:
        print(json.dumps([asdict(one) for one in results], indent=2))
    else:
        Console(width=150).print(table_of(results))


if __name__ == "__main__":
    main()
