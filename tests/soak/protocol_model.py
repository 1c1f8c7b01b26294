"""Ten thousand random sequences of the protocol against its reference: `make test-protocol-model`.

What a sequence does is in tests/support/protocol; a few are part of `make test`. Sequences come in batches, each drawn
from a seed of its own, by as many processes as there are cores. A batch that fails prints the steps
of the sequence and what plays the batch again.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from multiprocessing import get_context

import structlog
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from support.protocol.machine import ProtocolMachine

BATCH_SEQUENCES = 100


def run_batch(number: int) -> str:
    """Empty, or what went wrong."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    drawn = settings(
        max_examples=BATCH_SEQUENCES,
        stateful_step_count=20,
        deadline=None,
        database=None,
        phases=(Phase.generate,),  # a shorter sequence may not meet the moment that this one has met
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(number)(ProtocolMachine), settings=drawn)
    except Exception:
        again = f"--seed {number} --sequences {BATCH_SEQUENCES}"
        return f"again: {again}\n{traceback.format_exc()}"
    finally:
        ProtocolMachine.discard()
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1, help="the number of the first batch")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    batches = -(-asked.sequences // BATCH_SEQUENCES)
    started = time.monotonic()
    failed = []
    with get_context("spawn").Pool(asked.processes) as pool:
        numbers = range(asked.seed, asked.seed + batches)
        for done, failure in enumerate(pool.imap_unordered(run_batch, numbers), start=1):
            print(f"{done * BATCH_SEQUENCES} sequences, {time.monotonic() - started:.0f} s", flush=True)
            if failure:
                failed.append(failure)
                print(failure, flush=True)
    minutes = (time.monotonic() - started) / 60
    print(f"{batches * BATCH_SEQUENCES} sequences from seed {asked.seed}, {minutes:.0f} minutes, {len(failed)} failed")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
