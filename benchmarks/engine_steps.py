"""Training steps of an engine of the worker's, without worker or server around it.

A process of its own, since one process can be the driver of one Ray: reads a count per line on standard input, does
so many steps, and answers with the seconds that they took. Steps go to the adapters in turn.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tinsmith_trainer.engines.base import AdamParams, Datum, LoraSpec, LossSpec, Work
from tinsmith_trainer.parity.sides import Side, compute, opened, options_of, parse_choice
from tinsmith_trainer.process.output import configure_logs
from workloads import ALPHA, BETAS, EPS, LEARNING_RATE, RANK, ROWS, TOKENS, token_rows

ADAM = AdamParams(LEARNING_RATE, BETAS[0], BETAS[1], EPS)


def stepper(engine: Side, adapters: int) -> Callable[[], None]:
    names = [f"adapter-{number}" for number in range(adapters)]
    for seed, name in enumerate(names):
        engine.create_adapter(name, LoraSpec(RANK, ALPHA, seed))
    rows = np.array(token_rows(ROWS, TOKENS + 1, engine.base_model().vocab_size))
    datums = [Datum(row[:-1].astype(np.int32), {"target_tokens": row[1:]}) for row in rows]
    turns = itertools.cycle(names)

    def step() -> None:
        name = next(turns)
        compute(engine, Work(name, datums, LossSpec("cross_entropy")))
        engine.optim_step(name, ADAM)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", help="as of `tinsmith parity`")
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapters", type=int, default=1)
    given = parser.parse_args()
    configure_logs("console", "error")  # standard output is for the seconds
    choice = parse_choice(given.engine)
    with opened(choice, options_of(choice, model=str(given.model), rank=RANK)) as engine:
        step = stepper(engine, given.adapters)
        for line in sys.stdin:
            started = time.perf_counter()
            for _ in range(int(line)):
                step()
            print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
