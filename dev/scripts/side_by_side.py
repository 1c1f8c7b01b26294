"""Run make targets at the same time: side_by_side.py [--at-once=NUMBER] TARGET...

Each line of output begins with the name of the target. With `--at-once`, the targets start in the given order, each as
soon as an earlier one has ended, so give the longest first. At the end, the script repeats the failures, because
earlier output has scrolled away.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor

INTERRUPTED = 130
# The texts with which pytest's summary and make report a failure.
FAILURE = re.compile(r"(FAILED|ERROR) |make(\[\d+\])?: \*\*\*|=+ .*\b(failed|error)")
LAST_LINES = 10
"""How many last lines of a failed target are shown if no line explains the failure."""


def main(arguments: list[str]) -> int:
    """Run the targets until all have ended. Return 1 if a target failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--at-once", type=int, help="how many targets run at the same time; without it, all")
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    options = parser.parse_args(arguments)
    runs = [Run(target) for target in options.targets]
    with ThreadPoolExecutor(options.at_once or len(runs)) as pool:
        ended = [pool.submit(run.until_ended) for run in runs]
        try:
            statuses = [each.result() for each in ended]
        except KeyboardInterrupt:
            # The terminal has also sent the signal to the targets. Each target stops the programs that it started.
            pool.shutdown(cancel_futures=True)
            return INTERRUPTED
    for run, status in zip(runs, statuses, strict=True):
        if status != 0:
            run.tell_failure(status)
    return int(any(statuses))


class Run:
    """A run of a target that prints the output immediately, and keeps the lines that explain a failure."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._failures: list[str] = []
        self._last: deque[str] = deque(maxlen=LAST_LINES)

    def until_ended(self) -> int:
        """Run the target. Return its exit status."""
        command = [os.environ.get("MAKE", "make"), "--no-print-directory", self._target]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(f"{self._target} | {line}", end="", flush=True)
                self._last.append(line)
                if FAILURE.match(line):
                    self._failures.append(line)
        return process.returncode

    def tell_failure(self, status: int) -> None:
        told = self._failures or list(self._last)
        print(f"make {self._target} failed with status {status}:\n  {'  '.join(told).rstrip()}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
