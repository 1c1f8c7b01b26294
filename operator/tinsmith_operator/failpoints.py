"""Where a test may kill the operator: before its n-th write, as a node that loses power would."""

from __future__ import annotations

import os
import signal

from tinsmith_operator.cluster import Permit


def dying_before(write: int, permit: Permit) -> Permit:
    """The permit, for all but the n-th write (from 1), at which the process ends by SIGKILL. 0 never dies."""
    if write == 0:
        return permit
    left = write

    def permit_or_die() -> float:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return permit()

    return permit_or_die
