"""The output projection and its gradients on the CPU, as a share of what the machine's products alone would take.

Necessary are the logits, the average row under each token's distribution, and the gradient of the LoRA's B. The
machine's rate is that of the better library's large product; what its memory gives is printed beside it. Times are the
processor's, in which other programs of the machine have less part than in the clock's.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from comparing import Options, parse_options
from rich.console import Console
from rich.table import Table
from tinsmith_trainer.engines.peft.logprobs import target_logprobs
from tinsmith_trainer.engines.peft.settings import PeftEngineSettings
from tinsmith_trainer.torch_model.device import WarmMemory
from tinsmith_trainer.torch_model.lora import OwnDelta, StackedLoraLinear
from tinsmith_trainer.torch_model.products import linear_product
from torch import Tensor, nn
from workloads import ROWS, TOKENS

RANK = 8
SHAPES = ((51_200, 64), (151_936, 256))
SIDE = 1024
MEGABYTES = 200


@dataclass(frozen=True, slots=True)
class Machine:
    """Of `threads` threads together: products by each library in GFLOP/s, memory in GB/s."""

    threads: int
    default_gflops: float
    widest_gflops: float
    read_gb: float
    first_touch_gb: float

    def seconds(self, operations: float) -> float:
        return operations / max(self.default_gflops, self.widest_gflops) / 1e9


@dataclass(frozen=True, slots=True)
class Projection:
    """`share` is the necessary products' own time in the median one of forward and backward."""

    vocab_size: int
    hidden_size: int
    rank: int
    seconds: float
    share: float


def machine(options: Options) -> Machine:
    left, right, out = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE), torch.empty(SIDE, SIDE)
    block = torch.ones(MEGABYTES * 250_000)
    operations = 2 * SIDE**3
    return Machine(
        options.threads,
        operations / fastest(lambda: torch.mm(left, right.T, out=out), options.blocks) / 1e9,
        operations / fastest(lambda: linear_product(left, right), options.blocks) / 1e9,
        MEGABYTES / 1e3 / fastest(block.sum, options.blocks),
        MEGABYTES / 1e3 / fastest(lambda: torch.empty_like(block).zero_(), options.blocks),
    )


def measure(vocab_size: int, hidden_size: int, rank: int, limits: Machine, options: Options) -> Projection:
    seconds = statistics.median(times(step(vocab_size, hidden_size, rank), options.blocks))
    operations = 2 * ROWS * TOKENS * vocab_size * (2 * hidden_size + 3 * rank)
    return Projection(vocab_size, hidden_size, rank, seconds, limits.seconds(operations) / seconds)


def step(vocab_size: int, hidden_size: int, rank: int) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int, size: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(size).requires_grad_()

    tokens, budget = ROWS * TOKENS, PeftEngineSettings().logits_byte_budget
    head = StackedLoraLinear(nn.Linear(hidden_size, vocab_size, bias=False).requires_grad_(False), "lm_head")
    hidden = normal(tokens, hidden_size, 1.0)
    delta = OwnDelta(normal(rank, hidden_size, 0.1), normal(vocab_size, rank, 0.02), 1.0) if rank else None
    targets = torch.randint(vocab_size, (tokens, 1), generator=generator)
    memory = WarmMemory()

    def run() -> None:
        memory.begin(budget)
        logprobs = target_logprobs(
            hidden, targets, head, delta, product_tokens=TOKENS, byte_budget=budget, memory=memory
        )
        logprobs.sum().backward()

    return run


def times(run: Callable[[], object], count: int) -> list[float]:
    run()
    seconds = []
    for _ in range(count):
        started = time.process_time()
        run()
        seconds.append(time.process_time() - started)
    return seconds


def fastest(run: Callable[[], object], count: int) -> float:
    return min(times(run, count))


def draw(limits: Machine, results: list[Projection]) -> Table:
    table = Table(
        title=f"{ROWS} x {TOKENS} tokens, threads: {limits.threads}",
        caption=f"products {limits.default_gflops:.0f} GFLOP/s by mm and {limits.widest_gflops:.0f} by ours; "
        f"memory {limits.read_gb:.0f} GB/s read, {limits.first_touch_gb:.1f} GB/s at its first touch",
    )
    for heading in ("vocabulary", "hidden", "rank", "forward and backward", "share of the limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in results:
        table.add_row(
            f"{one.vocab_size:,}",
            str(one.hidden_size),
            str(one.rank),
            f"{one.seconds * 1e3:.0f} ms",
            f"{one.share:.2f}",
        )
    return table


def main() -> None:
    options = parse_options(__doc__.partition("\n")[0], with_models=False)
    torch.set_num_threads(options.threads)
    limits = machine(options)
    results = [measure(*shape, rank, limits, options) for shape in SHAPES for rank in (RANK, 0)]
    if options.json:
        print(json.dumps({"machine": asdict(limits), "projections": [asdict(one) for one in results]}, indent=2))
    else:
        Console().print(draw(limits, results))


if __name__ == "__main__":
    main()
