"""Run make targets at the same time. Each line of output begins with the name of the target: side_by_side.py TARGET...

At the end, the script repeats the failures, because earlier output has scrolled away.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from typing import IO

INTERRUPTED = 130
# The texts with which pytest's summary and make report a failure.
FAILURE = re.compile(r"(FAILED|ERROR) |make(\[\d+\])?: \*\*\*|=+ .*\b(failed|error)")
LAST_LINES = 10
"""How many last lines of a failed target are shown if no line explains the failure."""


def main(targets: list[str]) -> int:
    """Run the targets until all have ended. Return 1 if a target failed."""
    make = [os.environ.get("MAKE", "make"), "--no-print-directory"]
    running = [
        subprocess.Popen([*make, target], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for target in targets
    ]
    readers = [Reader(target, process) for target, process in zip(targets, running, strict=True)]
    try:
        statuses = [process.wait() for process in running]
    except KeyboardInterrupt:
        # The terminal has also sent the signal to the targets. Each target stops the programs that it started.
        for process in running:
            process.wait()
        return INTERRUPTED
    for reader in readers:
        reader.join()
    for reader, status in zip(readers, statuses, strict=True):
        if status != 0:
            reader.tell_failure(status)
    return int(any(statuses))


class Reader:
    """A reader that prints the output of a target immediately, and keeps the lines that explain a failure."""

    def __init__(self, target: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._target = target
        self._failures: list[str] = []
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._thread = threading.Thread(target=self._pass_on, args=(process.stdout,), daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def tell_failure(self, status: int) -> None:
        told = self._failures or list(self._last)
        print(f"make {self._target} failed with status {status}:\n  {'  '.join(told).rstrip()}", flush=True)

    def _pass_on(self, output: IO[str]) -> None:
        for line in output:
            print(f"{self._target} | {line}", end="", flush=True)
            self._last.append(line)
            if FAILURE.match(line):
                self._failures.append(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
