"""Samples per second, compared with transformers' `generate` and a PEFT adapter; and eight adapters compared with one.

The benchmark measures sampling through SDK and server. The benchmark also measures the sampler alone, in this process,
with the same calls that the worker makes.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from comparing import Medians, Options, Side, measure_in_turns, parse_options
from rich.console import Console
from rich.table import Table
from sides import ServedSamples, bare, training_client
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome, SamplingParams
from tinsmith_trainer.sampling.builtin import BuiltinSampler
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from workloads import ALPHA, PROMPT_TOKENS, RANK, SAMPLED_TOKENS, Workload, token_rows

SAMPLES_ONE_BY_ONE = 4
ADAPTERS = [f"adapter-{number}" for number in range(8)]


@dataclass(frozen=True, slots=True)
class SamplingRate:
    """Samples per second of one model, compared with a reference."""

    parameters: str
    threads: int
    what: str
    reference: str
    samples_per_second: Medians
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class RequestSize:
    """The parameters of each request."""

    samples: int = 1
    prompt_tokens: int = PROMPT_TOKENS


class SamplerAlone:
    """The sampler in this process, without a server. The adapters alternate from request to request."""

    def __init__(
        self,
        sampler: BuiltinSampler,
        vocab_size: int,
        adapters: Sequence[str],
        size: RequestSize,
    ) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._adapters = adapters
        self._size = size
        self._params = SamplingParams(max_tokens=SAMPLED_TOKENS, temperature=1.0, stop_tokens=())
        self._seeds = itertools.count(1)

    def seconds_for_one_of(self, count: int) -> float:
        """Sample new prompts in each block, like `ServedSamples`."""
        samples, tokens = self._size.samples, self._size.prompt_tokens
        prompts = token_rows(count // samples, tokens, self._vocab_size, seed=next(self._seeds))
        answers = _Answers(len(prompts), samples)
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            adapter = self._adapters[number % len(self._adapters)]
            ids = np.array(prompt, np.int32)
            job = SampleJob(f"request-{number}", adapter, ids, self._params, num_samples=samples)
            self._sampler.submit(job, answers.take)
        answers.wait()
        return (time.perf_counter() - started) / count


class _Answers:
    """The answers to several jobs, each with several samples. All samples must have the full length."""

    def __init__(self, jobs: int, samples: int) -> None:
        self._left = jobs
        self._lengths = [SAMPLED_TOKENS] * samples
        self._there = threading.Event()
        self._wrong: list[SampleOutcome] = []

    def take(self, outcome: SampleOutcome) -> None:
        if [len(sequence.tokens) for sequence in outcome.sequences] != self._lengths:
            self._wrong.append(outcome)
        self._left -= 1
        if not self._left:
            self._there.set()

    def wait(self) -> None:
        self._there.wait()
        assert not self._wrong, self._wrong[0].error


def random_adapter(model: TorchModel, seed: int) -> AdapterState:
    drawn = np.random.default_rng(seed)
    tensors = {}
    for name, layer in model.layers.items():
        tensors[f"weights/{name}.lora_A"] = drawn.normal(0, 0.02, (RANK, layer.in_features)).astype(np.float32)
        tensors[f"weights/{name}.lora_B"] = drawn.normal(0, 0.02, (layer.out_features, RANK)).astype(np.float32)
    return AdapterState(LoraSpec(RANK, ALPHA, seed), optimizer_step=0, tensors=tensors)


@dataclass(frozen=True, slots=True)
class Bench:
    workload: Workload
    model: Path
    options: Options

    def served(self, scratch: Path) -> list[SamplingRate]:
        """Measure sampling through SDK and server."""
        vocab_size = self.workload.shape.vocab_size
        with training_client(self.model, scratch) as training:
            client = training.save_weights_and_get_sampling_client().result()
            requests, of_eight = ServedSamples(client, vocab_size), ServedSamples(client, vocab_size, 8)
            one_by_one = self._compared("one_by_one", "32 requests", requests, 32, reference_count=SAMPLES_ONE_BY_ONE)
            return [
                one_by_one,
                self._compared("together", "32 requests", requests, 32),
                self._compared("together", "64 requests", requests, 64, goal=1.0),
                self._compared("one_prompt", "a request of 8", of_eight, 8),
            ]

    def alone(self) -> list[SamplingRate]:
        """Measure the sampler in this process with the given number of threads."""
        model = load_torch_model(str(self.model))
        sampler = BuiltinSampler(model)
        for seed, key in enumerate(ADAPTERS):
            sampler.load_adapter(key, random_adapter(model, seed))
        vocab_size = self.workload.shape.vocab_size
        one = SamplerAlone(sampler, vocab_size, ADAPTERS[:1], RequestSize())
        eight = SamplerAlone(sampler, vocab_size, ADAPTERS, RequestSize())
        try:
            return [
                self._compared("together", "64 requests, the sampler alone", one, 64, goal=1.0),
                compared(
                    self.workload,
                    self.options,
                    one,
                    eight,
                    what="32 of eight adapters, alone",
                    name="one adapter",
                    count=32,
                    goal=0.8,
                ),
            ]
        finally:
            sampler.close()

    def _compared(
        self,
        loop: str,
        what: str,
        side: Side,
        count: int,
        *,
        reference_count: int | None = None,
        goal: float | None = None,
    ) -> SamplingRate:
        """Compare with a call of `generate` for the same number of samples, or for `reference_count` samples."""
        with bare(f"sample_{loop}", self.model) as reference:
            name = f"generate, {loop.replace('_', ' ')}"
            return compared(
                self.workload,
                self.options,
                reference,
                side,
                what=what,
                name=name,
                count=count,
                reference_count=reference_count,
                goal=goal,
            )


def compared(
    workload: Workload,
    options: Options,
    reference: Side,
    side: Side,
    *,
    what: str,
    name: str,
    count: int,
    reference_count: int | None = None,
    goal: float | None = None,
) -> SamplingRate:
    """Measure `count` samples of each side, in turns."""
    pairs = measure_in_turns(
        reference,
        side,
        reference_count=reference_count or count,
        served_count=count,
        blocks=options.blocks,
        name=f"{workload.name} parameters, {what} against {name}",
    )
    medians = Medians.of([(1 / reference_seconds, 1 / served_seconds) for reference_seconds, served_seconds in pairs])
    return SamplingRate(workload.name, options.threads, what, name, medians, goal)


def draw(results: Sequence[SamplingRate]) -> Table:
    what = f"samples of {SAMPLED_TOKENS} tokens per second, prompts of {PROMPT_TOKENS}"
    table = Table(title=f"{what}, threads: {results[0].threads}")
    for heading in ("model", "what", "reference", "reference's", "measured", "ratio", "quartiles", "goal"):
        table.add_column(heading, no_wrap=True)
    for one in results:
        medians = one.samples_per_second
        low, high = medians.ratio_quartiles
        reached = "" if one.goal is None else "[green]" if medians.ratio >= one.goal else "[red]"
        table.add_row(
            one.parameters,
            one.what,
            one.reference,
            f"{medians.reference:.1f}",
            f"{medians.served:.1f}",
            f"{reached}{medians.ratio:.2f}",
            f"{low:.2f} to {high:.2f}",
            "" if one.goal is None else f"{one.goal:.1f}",
        )
    return table


def main() -> None:
    options = parse_options(__doc__.partition("\n")[0])
    torch.set_num_threads(options.threads)
    results: list[SamplingRate] = []
    for workload in options.workloads:
        with tempfile.TemporaryDirectory() as scratch:
            model = make_tiny_model(Path(scratch) / "model", shape=workload.shape)
            bench = Bench(workload, model, options)
            results += bench.served(Path(scratch))
            results += bench.alone()
    if options.json:
        print(json.dumps([asdict(one) for one in results], indent=2))
    else:
        Console(width=140).print(draw(results))


if __name__ == "__main__":
    main()
