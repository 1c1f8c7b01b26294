"""Named points at which a test can kill the process, as a power cut would.

`TINSMITH_FAILPOINT=name` or `name:n` kills the process by SIGKILL when the process reaches the point for the n-th time
(n counts from 1). Without the variable, a point costs one dictionary look-up.
"""

from __future__ import annotations

import os
import signal
from typing import Literal, get_args

Failpoint = Literal[
    "accept-before-sync",
    "accept-after-sync",
    "operation-preempted",
    "forward-shared",
    "executed-before-result",
    "result-before-sync",
    "result-before-visible",
    "snapshot-mid-write",
    "snapshot-before-rename",
    "snapshot-before-commit",
    "park-before-journal",
    "park-before-drop",
    "restore-before-load",
    "load-read",
    "save-before-write",
    "checkpoint-before-manifest",
    "checkpoint-before-commit",
]
FAILPOINTS: tuple[str, ...] = get_args(Failpoint)

_armed: dict[str, int] = {}


def _arm(setting: str) -> None:
    name, _, arrival = setting.partition(":")
    if name not in FAILPOINTS:
        raise ValueError(f"TINSMITH_FAILPOINT={setting!r}: no such place; there are {', '.join(FAILPOINTS)}.")
    _armed[name] = int(arrival or 1)


if os.environ.get("TINSMITH_FAILPOINT"):
    _arm(os.environ["TINSMITH_FAILPOINT"])


def reach(name: Failpoint) -> None:
    """Kill the process if the variable names this point and the count is reached."""
    if name not in _armed:
        return
    _armed[name] -= 1
    if _armed[name] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
