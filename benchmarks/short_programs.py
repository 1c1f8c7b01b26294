"""How long short programs that never end their session wait for their models, beside others that train all the time.

The reference is the same worker with a slot for each model, so that none is ever parked.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import tinker
from rich.console import Console
from rich.table import Table
from sides import API_KEY, MODEL, ServedSteps
from tinker import types
from tinsmith.local_server import running_server
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from workloads import RANK, WORKLOADS, Workload

PROGRAMS = 40
SLOTS = 8
GOAL_SECONDS = 2.0
_DATUM = types.Datum(
    model_input=types.ModelInput.from_ints(list(range(16))),
    loss_fn_inputs={"target_tokens": list(range(1, 17)), "weights": [1.0] * 16},  # type: ignore[dict-item]
)


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds of each program, from its first call until it has its model; steps of those beside them, per second."""

    name: str
    seconds: list[float]
    steps_per_second: float


class Neighbour:
    """A program that trains until it is told to stop."""

    def __init__(self, client: tinker.TrainingClient, vocab_size: int) -> None:
        self._steps = ServedSteps(client, vocab_size)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self.steps = 0

    def start(self) -> None:
        self._steps.seconds_for_one_of(1)
        self._thread.start()

    def _train(self) -> None:
        while not self._stop.is_set():
            self._steps.seconds_for_one_of(1)
            self.steps += 2

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def program(base_url: str) -> Iterator[tinker.TrainingClient]:
    """Ends its session only when all of this benchmark is over."""
    service = tinker.ServiceClient(base_url=base_url, api_key=API_KEY)
    yield service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
    service.close("success").result()


def measure(name: str, workload: Workload, slots: int, busy: int, scratch: Path) -> Waits:
    model = make_tiny_model(scratch / "model", shape=workload.shape)
    arguments = [f"--data={scratch / 'data'}", f"--model={MODEL}={model}", "--log-level=warning"]
    os.environ["TINSMITH_ADAPTER_SLOTS"] = str(slots)
    vocab_size = workload.shape.vocab_size
    with running_server(arguments, API_KEY, scratch) as base_url, ExitStack() as programs:
        neighbours = [Neighbour(programs.enter_context(program(base_url)), vocab_size) for _ in range(busy)]
        for neighbour in neighbours:
            neighbour.start()
        before, started = sum(one.steps for one in neighbours), time.perf_counter()
        seconds = [_one_program(programs, base_url) for _ in range(PROGRAMS)]
        steps, elapsed = sum(one.steps for one in neighbours) - before, time.perf_counter() - started
        for neighbour in neighbours:
            neighbour.stop()
    return Waits(name, seconds, steps / elapsed)


def _one_program(programs: ExitStack, base_url: str) -> float:
    started = time.perf_counter()
    client = programs.enter_context(program(base_url))
    waited = time.perf_counter() - started
    futures = client.forward_backward([_DATUM], "cross_entropy"), client.optim_step(types.AdamParams())
    for future in futures:
        future.result()
    return waited


def draw(results: Sequence[Waits], busy: int) -> Table:
    table = Table(title=f"{PROGRAMS} programs in a row, none of which ends its session, beside {busy} that train")
    for heading in ("slots", "p50", "p90", "max", "goal", "steps per second beside them"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in results:
        deciles, longest = statistics.quantiles(one.seconds, n=10), max(one.seconds)
        table.add_row(
            one.name,
            f"{statistics.median(one.seconds):.2f} s",
            f"{deciles[-1]:.2f} s",
            f"[{'green' if longest <= GOAL_SECONDS else 'red'}]{longest:.2f} s",
            f"{GOAL_SECONDS:.2f} s",
            f"{one.steps_per_second:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=WORKLOADS, default="3M")
    parser.add_argument("--busy", type=int, default=4, help="programs that train all the time")
    options = parser.parse_args()
    results = []
    for name, slots in ((f"{SLOTS}", SLOTS), ("one for each", PROGRAMS + options.busy)):
        with tempfile.TemporaryDirectory() as scratch:
            results.append(measure(name, WORKLOADS[options.model], slots, options.busy, Path(scratch)))
    Console().print(draw(results, options.busy))


if __name__ == "__main__":
    main()
