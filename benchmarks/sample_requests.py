"""256 samples of three tokens, asked for at once: by the SDK, by plain HTTP, and by the sampler's own RPCs.

Three processes, a worker that samples from a tiny model, an API server over it and this program, and what each of
them takes of the processor. The reference is the same samples asked of the same worker by gRPC, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import tinker
from api_replica import API_KEY, MODEL
from api_sides import Installation, installation, poll, post, torch_worker
from rich.console import Console
from rich.table import Table
from tinker import types
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

BLOCKS = 15
SAMPLES = 256
SAMPLED_TOKENS = 3
PROMPT_TOKENS = 12
VOCAB = 256
HOLD_SECONDS = 25.0

Prompt = list[int]
Block = Callable[[Sequence[Prompt]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of SAMPLES samples: seconds until the last is there, and seconds of processor time of each process."""

    seconds: float
    client: float
    server: float
    worker: float


class WorkerRpcs:
    """The reference: a Sample and an AwaitSample for each, and nobody between."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[assignment]
        self._numbers = itertools.count()

    async def block(self, prompts: Sequence[Prompt]) -> None:
        await asyncio.gather(*(self._one(prompt) for prompt in prompts))

    async def _one(self, prompt: Prompt) -> None:
        request_id = f"bench:{next(self._numbers)}"
        request = worker_pb2.SampleRequest(
            request_id=request_id,
            sampling_session_id="bench",
            prompt_tokens=b"".join(token.to_bytes(4, "little") for token in prompt),
            num_samples=1,
            max_tokens=SAMPLED_TOKENS,
            temperature=1.0,
            top_k=-1,
            top_p=1.0,
            has_stop=True,
        )
        await self._stub.Sample(request)
        ask = worker_pb2.AwaitSampleRequest(request_id=request_id, timeout_seconds=HOLD_SECONDS)
        reply = await self._stub.AwaitSample(ask)
        assert reply.HasField("result"), reply


class PlainHttp:
    """`asample` and `retrieve_future` for each, as the SDK asks, without the SDK."""

    def __init__(self, session: aiohttp.ClientSession, url: str, sampling_session_id: str) -> None:
        self._session = session
        self._url = url
        self._sampling_session_id = sampling_session_id
        self._numbers = itertools.count()

    async def block(self, prompts: Sequence[Prompt]) -> None:
        await asyncio.gather(*(self._one(prompt) for prompt in prompts))

    async def _one(self, prompt: Prompt) -> None:
        body = {
            "sampling_session_id": self._sampling_session_id,
            "seq_id": next(self._numbers),
            "num_samples": 1,
            "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": SAMPLED_TOKENS, "temperature": 1.0, "stop": [], "top_k": -1, "top_p": 1},
            "type": "sample",
        }
        taken = await post(self._session, f"{self._url}/api/v1/asample", body)
        await poll(self._session, self._url, taken["request_id"])


class Sdk:
    """The unmodified SDK; all are submitted before the first is awaited."""

    def __init__(self, url: str) -> None:
        self._service = tinker.ServiceClient(base_url=url, api_key=API_KEY)
        self._client = self._service.create_sampling_client(base_model=MODEL).result()
        self._params = types.SamplingParams(max_tokens=SAMPLED_TOKENS, temperature=1.0, stop=[])

    async def block(self, prompts: Sequence[Prompt]) -> None:
        await asyncio.to_thread(self._block, prompts)

    def _block(self, prompts: Sequence[Prompt]) -> None:
        inputs = [types.ModelInput.from_ints(prompt) for prompt in prompts]
        for future in [self._client.sample(one, 1, self._params) for one in inputs]:
            [sequence] = future.result().sequences
            assert len(sequence.tokens) == SAMPLED_TOKENS

    def close(self) -> None:
        self._service.close("success").result()


async def cost_of(block: Block, prompts: Sequence[Prompt], running: Installation) -> Cost:
    pids = (os.getpid(), running.pids[0], running.worker_pid)
    before = [processor_seconds(pid) for pid in pids]
    started = time.perf_counter()
    await block(prompts)
    seconds = time.perf_counter() - started
    client, server, worker = (processor_seconds(pid) - was for pid, was in zip(pids, before, strict=True))
    return Cost(seconds, client, server, worker)


def processor_seconds(pid: int) -> float:
    """To a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def new_prompts(seed: int) -> list[Prompt]:
    """None of which was there before: prefixes kept from an earlier block would flatter whoever comes later."""
    numbers = random.Random(seed)
    return [[numbers.randrange(VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(SAMPLES)]


async def measure(running: Installation, blocks: int) -> dict[str, list[Cost]]:
    [url] = running.urls
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        grpc.aio.insecure_channel(f"unix:{running.socket}") as channel,
    ):
        sdk = await asyncio.to_thread(Sdk, url)
        http = PlainHttp(session, url, await sampling_session(session, url))
        sides: dict[str, Block] = {
            "the sampler's RPCs": WorkerRpcs(channel).block,
            "plain HTTP": http.block,
            "the SDK": sdk.block,
        }
        costs: dict[str, list[Cost]] = {name: [] for name in sides}
        for number in range(blocks + 1):
            for place, (name, block) in enumerate(sides.items()):
                cost = await cost_of(block, new_prompts(number * len(sides) + place), running)
                if number:  # the first opens connections
                    costs[name].append(cost)
        await asyncio.to_thread(sdk.close)
    return costs


async def sampling_session(session: aiohttp.ClientSession, url: str) -> str:
    started = {"tags": [], "user_metadata": {}, "sdk_version": "benchmark"}
    session_id = (await post(session, f"{url}/api/v1/create_session", started))["session_id"]
    body: dict[str, Any] = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
    return str((await post(session, f"{url}/api/v1/create_sampling_session", body))["sampling_session_id"])


def medians(costs: Sequence[Cost]) -> Cost:
    fields = zip(*(asdict(cost).values() for cost in costs), strict=True)
    return Cost(*(statistics.median(values) for values in fields))


def draw(results: dict[str, Cost]) -> Table:
    table = Table(title=f"{SAMPLES} samples of {SAMPLED_TOKENS} tokens at once, in seconds")
    for heading in ("by", "until all are there", "ratio", "processor: client", "server", "worker"):
        table.add_column(heading, justify="right", no_wrap=True)
    reference = next(iter(results.values())).seconds
    for name, one in results.items():
        processors = (f"{seconds:.2f}" for seconds in (one.client, one.server, one.worker))
        table.add_row(name, f"{one.seconds:.3f}", f"{one.seconds / reference:.2f}", *processors)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="measurements of each side")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    os.environ |= {"TINKER_TELEMETRY": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with tempfile.TemporaryDirectory(prefix="tinsmith-") as scratch:
        model = make_tiny_model(Path(scratch) / "model")
        with installation(Path(scratch) / "installation", 1, None, torch_worker(model)) as running:
            results = {name: medians(costs) for name, costs in asyncio.run(measure(running, given.blocks)).items()}
    if given.json:
        print(json.dumps({name: asdict(cost) for name, cost in results.items()}, indent=2))
    else:
        Console(width=140).print(draw(results))


if __name__ == "__main__":
    main()
