"""With how many threads a worker on this machine computes, where nobody has said.

One core is left for the server and the program that trains. Where threads fill all cores, each of their barriers waits
for one that had to give way: two on two cores took three times as long as one, beside a client and a server.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

THREADS_VARIABLE = "OMP_NUM_THREADS"
CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def worker_threads() -> int:
    """At least one. On systems that do not say which processors share a core, each counts as one."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return threads_beside_others(cores_of(usable), _read(QUOTA))


def threads_beside_others(cores: int, quota: str) -> int:
    """`quota`: as the kernel writes it, `max 100000` or the microseconds of processor time in so many."""
    allowed, _, period = quota.partition(" ")
    if allowed.isdigit() and period.strip().isdigit():
        cores = min(cores, math.ceil(int(allowed) / int(period)))
    return max(1, cores - 1)


def cores_of(cpus: Iterable[int], root: Path = CPUS) -> int:
    """Hyper-threads of one core compute no faster than one of them."""
    return len({_read(root / f"cpu{cpu}" / "topology" / "thread_siblings_list").strip() or str(cpu) for cpu in cpus})


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
