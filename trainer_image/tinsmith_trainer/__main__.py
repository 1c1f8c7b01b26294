"""`python -m tinsmith_trainer`: one worker process."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    # Process 1 of a container never gets a signal that it does not handle, and what is imported next takes seconds:
    # a pod that is deleted meanwhile would wait out its whole grace period.
    signal.signal(signal.SIGTERM, _leave)
    from tinsmith_trainer.worker.process import run

    return run(sys.argv[1:])


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Nothing has been opened yet."""
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
