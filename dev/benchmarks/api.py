"""The overhead of the API server compared with direct RPCs to the worker: submit time, futures per second, held polls.

The worker computes with numpy in a fraction of a millisecond, so the benchmark measures almost only the API server. For
the reference, the same work is sent to the same worker by gRPC, in turns with the work through the API server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
from api_sides import ApiSide, Installation, Replicas, bare_worker, installation, new_model, poll
from rich.console import Console
from rich.table import Table
from support.server.postgres import postgres_server

BLOCKS = 30
SUBMITS_PER_BLOCK = 20
FUTURES_PER_BLOCK = 100
IN_FLIGHT = 32
POLLS = 1000
# Long enough that the client does not cut off a server that answers a thousand polls.
CLIENT_TIMEOUT = aiohttp.ClientTimeout(total=300)

PERCENT = 100


@dataclass(frozen=True, slots=True)
class Overhead:
    """The overhead of one installation. Each pair is (reference, served)."""

    submits: list[tuple[list[float], list[float]]]
    rates: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class HeldPolls:
    """`kib_each`: growth of the server's resident memory per poll.

    `release`: the seconds from the submit of the operation to the answers of the held polls.
    """

    kib_each: float
    release: list[float]


class Numbered:
    """A side of the comparison, with the sequence numbers that are not used yet."""

    def __init__(self, side: ApiSide) -> None:
        self._side = side
        self._numbers = itertools.count(1)

    async def submits(self, count: int) -> list[float]:
        """Return the seconds of each submit, measured one submit after another.

        The function returns after all results have arrived.
        """
        seconds = []
        numbers = list(itertools.islice(self._numbers, count))
        for number in numbers:
            started = time.perf_counter()
            await self._side.submit(number)
            seconds.append(time.perf_counter() - started)
        for number in numbers:
            await self._side.result(number)
        return seconds

    async def rate(self, count: int) -> float:
        """Return the futures per second, from submit to result, with IN_FLIGHT operations in flight."""
        waiting = asyncio.Semaphore(IN_FLIGHT)

        async def one(number: int) -> None:
            async with waiting:
                await self._side.submit(number)
                await self._side.result(number)

        started = time.perf_counter()
        await asyncio.gather(*(one(number) for number in itertools.islice(self._numbers, count)))
        return count / (time.perf_counter() - started)


async def measure_overhead(running: Installation, blocks: int) -> Overhead:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=CLIENT_TIMEOUT) as session,
        grpc.aio.insecure_channel(f"unix:{running.socket}") as channel,
    ):
        models = [await new_model(session, running.urls[0]) for _ in range(2)]
        reference = Numbered(await bare_worker(channel, models[0]))
        served = Numbered(Replicas(session, running.urls, models[1]))
        for side in (reference, served):
            await side.rate(FUTURES_PER_BLOCK)
        submits = [
            (await reference.submits(SUBMITS_PER_BLOCK), await served.submits(SUBMITS_PER_BLOCK)) for _ in range(blocks)
        ]
        rates = [(await reference.rate(FUTURES_PER_BLOCK), await served.rate(FUTURES_PER_BLOCK)) for _ in range(blocks)]
    return Overhead(submits, rates)


async def measure_held_polls(running: Installation) -> HeldPolls:
    """Measure many polls for operation 2, while operation 2 waits for operation 1."""
    [url], [pid] = running.urls, running.pids
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=CLIENT_TIMEOUT) as session:
        model_id = await new_model(session, url)
        side = Replicas(session, running.urls, model_id)
        await side.submit(2)
        before = resident_kib(pid)

        async def answered() -> float:
            await poll(session, url, f"{model_id}:op:2")
            return time.perf_counter()

        polls = [asyncio.create_task(answered()) for _ in range(POLLS)]
        await until_held(session, url)
        held = resident_kib(pid)
        started = time.perf_counter()
        await side.submit(1)
        ends = await asyncio.gather(*polls)
    return HeldPolls((held - before) / POLLS, [end - started for end in ends])


async def until_held(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until the server's metrics count this many held polls."""
    while True:
        async with session.get(f"{url}/metrics") as answer:
            if f"tinsmith_polls_held {float(POLLS)}" in await answer.text():
                return
        await asyncio.sleep(0.1)


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def draw(results: dict[str, Overhead]) -> Table:
    table = Table(title=f"The API server against bare gRPC to the same worker, {IN_FLIGHT} futures in flight")
    headings = ("", "submit p50", "bare", "ratio", "submit p99", "bare", "ratio", "futures/s", "bare", "ratio")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, one in results.items():
        cells: list[str] = []
        for percent in (50, 99):
            bare, served = percentiles(one.submits, percent)
            cells += [f"{served * 1e3:.2f} ms", f"{bare * 1e3:.2f} ms", f"{served / bare:.2f}"]
        bare, served = (statistics.median(side) for side in zip(*one.rates, strict=True))
        table.add_row(name, *cells, f"{served:.0f}", f"{bare:.0f}", f"{served / bare:.2f}")
    return table


def percentiles(pairs: Sequence[tuple[list[float], list[float]]], percent: int) -> tuple[float, float]:
    """Return a percentile over all submits of each side."""
    sides = [[seconds for block in side for seconds in block] for side in zip(*pairs, strict=True)]
    reference, served = (statistics.quantiles(side, n=PERCENT)[percent - 1] for side in sides)
    return reference, served


@contextmanager
def databases() -> Iterator[dict[str, tuple[int, str | None]]]:
    """Return the name of each database, the number of replicas, and the location of the store."""
    with postgres_server() as postgres:
        yield {
            "1 on SQLite": (1, None),
            "1 on PostgreSQL": (1, postgres.create_schema()),
            "2 on PostgreSQL": (2, postgres.create_schema()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="measurements of each side")
    blocks = parser.parse_args().blocks
    console = Console(width=140)
    with ExitStack() as opened:
        scratch = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tinsmith-")))
        results: dict[str, Overhead] = {}
        for number, (name, (replicas, url)) in enumerate(opened.enter_context(databases()).items()):
            with installation(scratch / str(number), replicas, url) as running:
                results[name] = asyncio.run(measure_overhead(running, blocks))
        with installation(scratch / "polls", 1, None) as running:
            polls = asyncio.run(measure_held_polls(running))
    console.print(draw(results))
    quantiles = statistics.quantiles(polls.release, n=PERCENT)
    console.print(
        f"{POLLS} held polls: {polls.kib_each:.1f} KiB of the server each; after the submit that ends them, "
        f"half were answered in {quantiles[49] * 1e3:.0f} ms, 99 % in {quantiles[98] * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
