"""The worker's process: `python -m tinsmith_trainer`."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from types import FrameType

from tinsmith_trainer.process import gc_pause


def main() -> int:
    """Run the worker and return the exit status of the process."""
    ended: list[int] = []
    # The first registered function is called last.
    atexit.register(_leave_modules, ended)
    # Process 1 of a container receives no signal without a handler. The next imports take seconds. Without this
    # handler, a deleted pod would wait for its whole grace period.
    signal.signal(signal.SIGTERM, _leave)
    with gc_pause():
        from tinsmith_trainer.worker.main import run

    ended.append(run(sys.argv[1:]))
    return ended[0]


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Exit at once; the process has opened no file and no socket yet."""
    os._exit(0)


def _leave_modules(ended: list[int]) -> None:
    """Exit without unloading the modules, because PyTorch takes a second or more to unload.

    All threads must have stopped before this call.
    """
    if not ended:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(ended[0])


if __name__ == "__main__":
    sys.exit(main())
