"""`python -m tinsmith_trainer`: one worker process."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from types import FrameType

from tinsmith_trainer.process import gc_pause


def main() -> int:
    """Returns the exit status."""
    ended: list[int] = []
    # What is registered first is called last.
    atexit.register(_leave_modules, ended)
    # Process 1 of a container never gets a signal that it does not handle, and what is imported next takes seconds:
    # a pod that is deleted meanwhile would wait out its whole grace period.
    signal.signal(signal.SIGTERM, _leave)
    with gc_pause():
        from tinsmith_trainer.worker.main import run

    ended.append(run(sys.argv[1:]))
    return ended[0]


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Nothing has been opened yet."""
    os._exit(0)


def _leave_modules(ended: list[int]) -> None:
    """Everything has stopped. Python would take the framework's modules down one by one, for a second and more."""
    if not ended:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(ended[0])


if __name__ == "__main__":
    sys.exit(main())
