"""Calls and samples on one GPU, measured: the calls whose costs gpu_model.py computes, and decode alone and with them.

The model has the shape of Qwen3 and random weights, which are made on the device. The engine and the sampler have the
settings of a worker on this device. A call is forward and backward, without a step of the optimizer. A decode step is
the difference between two lengths of samples, so that prompts are not counted. With `--profile`, the kernels of the
first call and of decode steps are written to files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import gpu_step
import numpy as np
import torch
from gpu_model import WORKLOADS, Workload, adapter_name, calls_of, compute_calls
from gpu_step import GB, free_memory
from rich.console import Console
from rich.table import Table
from tinsmith_trainer.engines.base import LoraProducts, LoraSpec
from tinsmith_trainer.engines.peft import PeftEngine, build_peft_engine
from tinsmith_trainer.engines.peft.settings import device_settings, plan_memory
from tinsmith_trainer.process.output import configure_logs
from tinsmith_trainer.sampling.builtin import BuiltinSampler, sampler_settings
from tinsmith_trainer.torch_model.device import choose_device
from tinsmith_trainer.torch_model.loading import TorchModel
from workloads import ALPHA, RANK

Item = TypeVar("Item")
Result = TypeVar("Result")

PROMPT_TOKENS = 256
SHORT_TOKENS, LONG_TOKENS = 16, 80
DECODES = ((1, 1), (8, 1), (32, 1), (32, 8))
"""The numbers of rows and of adapters among them."""
NEXT_TO_TRAINING = (8, 1)


@dataclass(frozen=True, slots=True)
class MeasuredCalls:
    """One call of each adapter at the same time. `seconds`: the median. `peak_gb`: weights included, None on a CPU."""

    name: str
    tokens: int
    forwards: int
    seconds: float
    peak_gb: float | None


@dataclass(frozen=True, slots=True)
class MeasuredDecode:
    """Decode steps of some rows. `calls_per_second`: the calls that trained meanwhile, of the first workload."""

    rows: int
    adapters: int
    step_seconds: float
    tokens_per_second: float
    calls_per_second: float | None = None

    @property
    def name(self) -> str:
        of = f"decode of {self.rows} rows" + (f" of {self.adapters} adapters" if self.adapters > 1 else "")
        return of if self.calls_per_second is None else f"{of}, next to {self.calls_per_second:.2f} calls a second"


@dataclass(frozen=True, slots=True)
class Bench:
    """A model on a device with the engine of a worker, and what the options ask for."""

    options: argparse.Namespace
    model: TorchModel
    engine: PeftEngine
    products: LoraProducts
    drawn: np.random.Generator
    ends_at: float

    @property
    def device(self) -> torch.device:
        return self.model.device

    def tokens(self, count: int) -> np.ndarray:
        return self.drawn.integers(0, self.model.info.vocab_size, count)

    def within_time(self, items: Iterable[Item], measure: Callable[[Item], Result]) -> Iterator[Result]:
        """Yield the measurements that begin within the time limit."""
        for item in items:
            if time.monotonic() < self.ends_at:
                yield measure(item)

    def call(self, workload: Workload) -> Callable[[], int]:
        """Return a function that computes the workload's calls and returns the number of forwards."""
        works = calls_of(workload, self.tokens)

        def compute() -> int:
            forwards: int = compute_calls(self.engine, works)
            for work in works:
                self.engine.clear_gradients(work.adapter_id)
            return forwards

        return compute

    def measure_calls(self, workload: Workload) -> MeasuredCalls:
        compute = self.call(workload)
        forwards = [compute() for _ in range(gpu_step.WARM_UP)][-1]
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [gpu_step.seconds_of(compute, 1, self.device) for _ in range(self.options.repeats)]
        peak = torch.cuda.max_memory_allocated() / GB if self.device.type == "cuda" else None
        return MeasuredCalls(workload.name, workload.tokens, forwards, statistics.median(seconds), peak)

    @contextmanager
    def trained(self, workload: Workload) -> Iterator[Callable[[], int]]:
        """Compute calls of the workload in a thread. Yields a function that returns the number of calls so far."""
        compute, stop, done = self.call(workload), threading.Event(), [0]

        def train() -> None:
            while not stop.is_set():
                compute()
                done[0] += 1

        thread = threading.Thread(target=train)
        thread.start()
        try:
            yield lambda: done[0]
        finally:
            stop.set()
            thread.join()


def measure_decode(bench: Bench, sampler: BuiltinSampler, rows: int, adapters: int) -> MeasuredDecode:
    """Measure decode steps. The short samples run first, so that the long ones find the prompts in the cache."""
    prompts = [bench.tokens(PROMPT_TOKENS) for _ in range(rows)]
    names = [adapter_name(number) for number in range(adapters)]

    def seconds_for(max_tokens: int) -> float:
        return gpu_step.seconds_of(
            lambda: gpu_step.draw_samples(sampler, prompts, names, max_tokens), 1, torch.device("cpu")
        )

    seconds_for(SHORT_TOKENS)
    short = seconds_for(SHORT_TOKENS)
    seconds = seconds_for(LONG_TOKENS) - short
    steps = LONG_TOKENS - SHORT_TOKENS
    return MeasuredDecode(rows, adapters, seconds / steps, rows * steps / seconds)


def measure_decode_next_to_training(bench: Bench, sampler: BuiltinSampler, workload: Workload) -> MeasuredDecode:
    with bench.trained(workload) as calls:
        before, started = calls(), time.perf_counter()
        decoded = measure_decode(bench, sampler, *NEXT_TO_TRAINING)
        rate = (calls() - before) / (time.perf_counter() - started)
    return replace(decoded, calls_per_second=rate)


def sampler_of(bench: Bench, adapters: int) -> BuiltinSampler:
    """Return a sampler with the engine's adapters."""
    settings = sampler_settings(bench.device.type, bench.products)
    sampler = BuiltinSampler(bench.model, replace(settings, kv_cache_bytes=bench.options.kv_cache_bytes))
    for number in range(adapters):
        sampler.load_adapter(adapter_name(number), bench.engine.state(adapter_name(number)).weights_only())
    return sampler


def write_profile(work: Callable[[], object], device: torch.device, file: Path) -> None:
    """Write the operations of the work with the most time on the device."""
    with torch.profiler.profile() as profile:
        gpu_step.seconds_of(work, 1, device)
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(profile.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=70))


def new_bench(options: argparse.Namespace, adapters: int) -> Bench:
    started = time.monotonic()
    device_name, dtype = choose_device(options.device, options.dtype)
    device = torch.device(device_name)
    model = gpu_step.torch_model(options.model, gpu_step.new_model(options.model, device, dtype))
    settings = device_settings(device.type, dtype, plan_memory(model, options.token_budget, "auto"))
    engine = build_peft_engine(model, replace(settings, adapter_slots=adapters))
    for number in range(adapters):
        engine.create_adapter(adapter_name(number), LoraSpec(RANK, ALPHA, seed=number))
    return Bench(options, model, engine, settings.lora_products, np.random.default_rng(0), started + options.seconds)


def measure(options: argparse.Namespace) -> tuple[list[MeasuredCalls], list[MeasuredDecode]]:
    workloads = [each for each in WORKLOADS[options.workloads] if options.only in each.name]
    adapters = max([each.adapters for each in workloads] + [count for _, count in DECODES if options.decode])
    bench = new_bench(options, adapters)
    calls = list(bench.within_time(workloads, bench.measure_calls))
    if options.profile is not None:
        write_profile(bench.call(workloads[0]), bench.device, options.profile / "call.txt")
    decodes = _decodes(bench, workloads[0]) if options.decode else []
    return calls, decodes


def _decodes(bench: Bench, workload: Workload) -> list[MeasuredDecode]:
    free_memory(bench.device)
    sampler = sampler_of(bench, max(count for _, count in DECODES))
    try:
        found = list(bench.within_time(DECODES, lambda counts: measure_decode(bench, sampler, *counts)))
        if bench.options.profile is not None:
            prompts = [bench.tokens(PROMPT_TOKENS) for _ in range(8)]
            file = bench.options.profile / "decode.txt"
            names = [adapter_name(0)]
            write_profile(lambda: gpu_step.draw_samples(sampler, prompts, names, SHORT_TOKENS), bench.device, file)
        with_training = bench.within_time([workload], lambda one: measure_decode_next_to_training(bench, sampler, one))
        return [*found, *with_training]
    finally:
        sampler.close()


def draw_calls(calls: Sequence[MeasuredCalls], title: str) -> Table:
    table = Table(title=title)
    table.add_column("call")
    for heading in ("tokens", "forwards", "ms", "tokens/s", "peak of memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in calls:
        peak = "" if each.peak_gb is None else f"{each.peak_gb:.1f} GB"
        rate = each.tokens / each.seconds
        table.add_row(
            each.name, f"{each.tokens:,}", str(each.forwards), f"{each.seconds * 1e3:,.1f}", f"{rate:,.0f}", peak
        )
    return table


def draw_decodes(decodes: Sequence[MeasuredDecode]) -> Table:
    table = Table(title=f"Decode after prompts of {PROMPT_TOKENS} tokens")
    table.add_column("decode")
    for heading in ("ms a step", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in decodes:
        table.add_row(each.name, f"{each.step_seconds * 1e3:,.1f}", f"{each.tokens_per_second:,.0f}")
    return table


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=gpu_step.SHAPES, default="8B", help="by its parameters")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", *gpu_step.DTYPES), default="auto")
    parser.add_argument(
        "--workloads", choices=WORKLOADS, default="steps", help="single calls, or calls of many adapters"
    )
    parser.add_argument("--only", default="", help="measure the calls whose name contains this text")
    parser.add_argument("--repeats", type=int, default=3, help="of each call, after two that are not measured")
    parser.add_argument("--seconds", type=float, default=600.0, help="after this time, no further measurement begins")
    parser.add_argument("--decode", action="store_true", help="measure decode steps, too")
    parser.add_argument("--kv-cache-bytes", type=int, default=8 * 2**30)
    parser.add_argument("--token-budget", type=int, help="as the worker's")
    parser.add_argument("--profile", type=Path, help="a folder for the profiles of the first call and of decode")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    configure_logs("console", "warning")
    calls, decodes = measure(options)
    if options.json:
        listed = [{"name": each.name, **asdict(each)} for each in decodes]
        print(json.dumps({"model": options.model, "calls": [asdict(each) for each in calls], "decodes": listed}))
        return
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    console = Console()
    console.print(draw_calls(calls, f"Qwen3-{options.model}'s shape on {where}"))
    if decodes:
        console.print(draw_decodes(decodes))


if __name__ == "__main__":
    main()
