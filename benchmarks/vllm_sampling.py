"""Samples per second of the built-in sampler beside vLLM itself, as its build for CPUs.

vLLM is asked by its own HTTP route, in JSON, without anything of ours around it; the built-in sampler in this process,
as the worker asks it. `make package-environments` installs vLLM, once.

vLLM is several processes and the sampler one, so on a machine that does other work it is given more of it: samples for
a second of processors say what each side needs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
import psutil
import torch
from comparing import Medians, Options, Side, parse_options
from rich.console import Console
from sampling import Asked, SamplerAlone, SamplingRate, compared, draw, random_adapter
from support.token_server.look_alikes import call
from support.token_server.real_vllm import EXTRA, RealHand, installed_vllm, real_vllm_variables
from support.token_server.shared import SharedServer
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.sampling.builtin import BuiltinSampler
from tinsmith_trainer.sampling.token_server.adapters import AdapterFolders
from tinsmith_trainer.sampling.token_server.base import SOCKET_SCHEME
from tinsmith_trainer.sampling.token_server.served_model import read_model
from tinsmith_trainer.sampling.token_server.vllm import BASE_MODEL
from tinsmith_trainer.torch_model.loading import load_torch_model
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from workloads import SAMPLED_TOKENS, Workload, token_rows

GROUPS = Asked(samples=8, prompt_tokens=512)
"""As a program of reinforcement learning asks."""


class Metered:
    """A side, and what processors gave it for one, each time."""

    def __init__(self, side: Side, processor_seconds: Callable[[], float]) -> None:
        self._side = side
        self._processor_seconds = processor_seconds
        self.for_one: list[float] = []

    def seconds_for_one_of(self, count: int) -> float:
        before = self._processor_seconds()
        seconds = self._side.seconds_for_one_of(count)
        self.for_one.append((self._processor_seconds() - before) / count)
        return seconds


def vllms_processor_seconds() -> float:
    """Of all its processes, which are this one's only children."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(time.user + time.system for time in times)


class VllmRequests:
    """All of them sent before the first is awaited."""

    def __init__(self, address: str, vocab_size: int, model: str, asked: Asked) -> None:
        self._address = address
        self._vocab_size = vocab_size
        self._model = model
        self._asked = asked
        self._seeds = itertools.count(1)

    def seconds_for_one_of(self, count: int) -> float:
        """New prompts each time."""
        return asyncio.run(self._ask(count)) / count

    async def _ask(self, count: int) -> float:
        prompts = count // self._asked.samples
        rows = token_rows(prompts, self._asked.prompt_tokens, self._vocab_size, seed=next(self._seeds))
        limits = httpx.Limits(max_connections=len(rows))
        transport = httpx.AsyncHTTPTransport(uds=self._address.removeprefix(SOCKET_SCHEME), limits=limits)
        async with httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=600) as http:
            started = time.perf_counter()
            await asyncio.gather(*(self._sample(http, row) for row in rows))
            return time.perf_counter() - started

    async def _sample(self, http: httpx.AsyncClient, prompt: Sequence[int]) -> None:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "n": self._asked.samples,
            "max_tokens": SAMPLED_TOKENS,
            "temperature": 1.0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = await http.post("/v1/completions", json=body)
        answer.raise_for_status()
        lengths = [len(choice["token_ids"]) for choice in answer.json()["choices"]]
        assert lengths == [SAMPLED_TOKENS] * self._asked.samples, lengths


@contextmanager
def running_vllm(directory: Path, scratch: Path, *words: str) -> Iterator[str]:
    """Its address."""
    path = f"{installed_vllm() / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {**real_vllm_variables(scratch), "PATH": path}
    server = SharedServer("vllm", read_model(str(directory)), variables, (*EXTRA, *words), RealHand)
    try:
        yield server.address
    finally:
        server.close()


@contextmanager
def loaded_adapter(address: str, state: AdapterState, directory: Path) -> Iterator[str]:
    """What vLLM calls it."""
    folders = AdapterFolders(None)
    try:
        adapter = folders.write("adapter", state, read_model(str(directory)))
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        call(address, "/v1/load_lora_adapter", json.dumps(body).encode())
        yield adapter.name
    finally:
        folders.remove_all()


@dataclass(frozen=True, slots=True)
class Bench:
    """Of one model. vLLM has no adapters in it where none is asked for: it is the faster for that."""

    workload: Workload
    directory: Path
    scratch: Path
    options: Options

    def run(self) -> list[SamplingRate]:
        model = load_torch_model(str(self.directory))
        state = random_adapter(model, seed=0)
        sampler = BuiltinSampler(model)
        sampler.load_adapter("adapter", state)
        try:
            with running_vllm(self.directory, self.scratch, "--no-enable-lora") as address:
                rates = [
                    *self._beside(address, BASE_MODEL, sampler, "", "64 requests", 64, Asked()),
                    *self._beside(address, BASE_MODEL, sampler, "", "8 prompts of 512, 8 of each", 64, GROUPS),
                ]
            with (
                running_vllm(self.directory, self.scratch) as address,
                loaded_adapter(address, state, self.directory) as name,
            ):
                return [*rates, *self._beside(address, name, sampler, "adapter", "16 of an adapter", 16, Asked())]
        finally:
            sampler.close()

    def _beside(
        self, address: str, theirs: str, sampler: BuiltinSampler, ours: str, what: str, count: int, asked: Asked
    ) -> list[SamplingRate]:
        """By the clock, and by what processors gave."""
        vocab_size = self.workload.shape.vocab_size
        reference = Metered(VllmRequests(address, vocab_size, theirs, asked), vllms_processor_seconds)
        side = Metered(SamplerAlone(sampler, vocab_size, [ours], asked), time.process_time)
        rate = compared(self.workload, self.options, reference, side, what=what, name="vLLM", count=count, goal=1.0)
        measured = zip(reference.for_one[1:], side.for_one[1:], strict=True)  # the first are to warm up
        by_processor = Medians.of([(1 / theirs_for_one, 1 / ours_for_one) for theirs_for_one, ours_for_one in measured])
        return [rate, replace(rate, what=f"{what}, by processors", samples_per_second=by_processor, goal=None)]


def main() -> None:
    options = parse_options(__doc__.partition("\n")[0])
    torch.set_num_threads(options.threads)
    results: list[SamplingRate] = []
    for workload in options.workloads:
        with tempfile.TemporaryDirectory() as scratch:
            directory = make_tiny_model(Path(scratch) / "model", shape=workload.shape)
            results += Bench(workload, directory, Path(scratch), options).run()
    if options.json:
        print(json.dumps([asdict(one) for one in results], indent=2))
    else:
        Console(width=140).print(draw(results))


if __name__ == "__main__":
    main()
