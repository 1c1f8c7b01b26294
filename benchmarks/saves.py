"""What saves cost: the call itself, other models meanwhile, and a loop that samples from new weights at each step.

The unmodified SDK, a server and its worker. A save's call stands beside a plain write and fsync of as many bytes into
the same folder; the others beside the same programs without saves.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import tinker
from comparing import Medians, Pair, parse_options
from rich.console import Console
from rich.table import Table
from sides import API_KEY, MODEL, ServedSteps, step_datum
from tinker import types
from tinsmith.local_server import running_server
from tinsmith_trainer.torch_model.tiny_model import TinyShape, make_tiny_model
from workloads import LEARNING_RATE, RANK, ROWS, TOKENS, WORKLOADS, token_rows

LARGE = TinyShape(hidden_size=2048, intermediate_size=4096, layers=8, heads=16, kv_heads=8)
LARGE_RANK = 352
"""An adapter of 370 MB."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ratio`: measured to reference, of seconds."""

    measured: str
    reference: str
    ratio: float
    quartiles: tuple[float, float]
    goal: float


@contextmanager
def programs(shape: TinyShape, scratch: Path, *ranks: int) -> Iterator[list[tinker.TrainingClient]]:
    model = make_tiny_model(scratch / "model", shape=shape)
    arguments = [f"--data={scratch / 'data'}", f"--model={MODEL}={model}", "--log-level=warning"]
    os.environ["TINSMITH_MAX_RANK"] = str(LARGE_RANK)
    with running_server(arguments, API_KEY, scratch) as base_url:
        services = [tinker.ServiceClient(base_url=base_url, api_key=API_KEY) for _ in ranks]
        yield [
            service.create_lora_training_client(base_model=MODEL, rank=rank).result()
            for service, rank in zip(services, ranks, strict=True)
        ]
        for service in services:
            service.close("success").result()


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure_call(scratch: Path, blocks: int) -> Iterator[Comparison]:
    """Of the large adapter's weights, for a sampler."""
    with programs(LARGE, scratch, LARGE_RANK, RANK) as (large, other):
        steps = ServedSteps(other, LARGE.vocab_size)
        steps.seconds_for_one_of(1)
        save_once(large, 0)
        size = max(file.stat().st_size for file in (scratch / "data").rglob("adapter_model.safetensors"))
        content = os.urandom(size)
        pairs = [
            (
                seconds_of(lambda: write_plainly(scratch / "data" / "plain", content)),
                seconds_of(lambda: save_once(large, 1)),
            )
            for _ in range(blocks)
        ]
        yield compared(f"a save of {size / 1e6:.0f} MB", "a write and fsync of as much", pairs, 1.2)
        pairs = [
            (steps.seconds_for_one_of(2), beside_saves(large, lambda: steps.seconds_for_one_of(2)))
            for _ in range(blocks)
        ]
        yield compared("another model's step beside saves", "without saves", pairs, 1 / 0.9)


def save_once(client: tinker.TrainingClient, number: int) -> None:
    client.save_weights_for_sampler(name=f"save-{number}-{time.time_ns()}").result()


def write_plainly(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def beside_saves(client: tinker.TrainingClient, measured: Callable[[], float]) -> float:
    stop = threading.Event()

    def save() -> None:
        while not stop.is_set():
            save_once(client, 2)

    saver = threading.Thread(target=save)
    saver.start()
    try:
        return measured()
    finally:
        stop.set()
        saver.join()


def measure_loop(scratch: Path, blocks: int) -> Comparison:
    """Of 30 M parameters. Each step is awaited, with a sampling client of its weights and without."""
    shape = WORKLOADS["30M"].shape
    with programs(shape, scratch, RANK) as (client,):
        data = [step_datum(row) for row in token_rows(ROWS, TOKENS + 1, shape.vocab_size)]
        adam = types.AdamParams(learning_rate=LEARNING_RATE)

        def step(*, saves: bool) -> None:
            futures = client.forward_backward(data, "cross_entropy"), client.optim_step(adam)
            for future in futures:
                future.result()
            if saves:
                client.save_weights_and_get_sampling_client()

        step(saves=True)
        pairs = [
            (seconds_of(lambda: step(saves=False)), seconds_of(lambda: step(saves=True))) for _ in range(2 * blocks)
        ]
    return compared("a step with new sampler weights, 30 M", "a step", pairs, 1.05)


def compared(measured: str, reference: str, pairs: Sequence[Pair], goal: float) -> Comparison:
    medians = Medians.of(pairs)
    return Comparison(measured, reference, medians.ratio, medians.ratio_quartiles, goal)


def draw(results: Sequence[Comparison]) -> Table:
    table = Table(title="Saves")
    for heading in ("measured", "reference", "times", "quartiles", "goal"):
        table.add_column(heading, no_wrap=True)
    for one in results:
        colour = "green" if one.ratio <= one.goal else "red"
        quartiles = " to ".join(f"{quartile:.2f}" for quartile in one.quartiles)
        table.add_row(one.measured, one.reference, f"[{colour}]{one.ratio:.2f}", quartiles, f"{one.goal:.2f}")
    return table


def main() -> None:
    options = parse_options(__doc__.partition("\n")[0], with_models=False)
    results: list[Comparison] = []
    with tempfile.TemporaryDirectory() as scratch:
        results += measure_call(Path(scratch), options.blocks)
    with tempfile.TemporaryDirectory() as scratch:
        results.append(measure_loop(Path(scratch), options.blocks))
    if options.json:
        print(json.dumps([asdict(one) for one in results], indent=2))
    else:
        Console(width=130).print(draw(results))


if __name__ == "__main__":
    main()
