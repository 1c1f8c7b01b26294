"""The processors and accelerators of this machine, and how workers use them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinsmith_server.settings import CPU

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Place:
    """The device of one worker of a model.

    The worker at the first place has the same ID as the only worker of a server without `devices`, and so keeps its
    volume. Without a device, the worker uses any device that it finds. `cpu_workers` share this machine's processors.
    """

    number: int = 0
    device: str | None = None
    cpu_workers: int = 1

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that force the worker to use the device.

        Without these flags, a worker that sees no GPU would silently use the CPU.
        """
        if self.device is None:
            return ()
        return ("--device", "cpu" if self.device == CPU else "cuda")

    def worker_id(self, weights: str) -> str:
        return weights if self.number == 0 else f"{weights}-{self.number + 1}"

    @property
    def environment(self) -> Mapping[str, str]:
        if self.device is None:
            return {}
        if self.device == CPU:
            return {VISIBLE_GPUS: "", THREADS_VARIABLE: str(max(1, worker_threads() // self.cpu_workers))}
        return {VISIBLE_GPUS: self.device}


ONLY_PLACE = Place()


def places(devices: Sequence[str]) -> list[Place]:
    """Return one place for each device, or one place if the server has no `devices`."""
    cpu_workers = devices.count(CPU)
    return [Place(number, device, cpu_workers) for number, device in enumerate(devices)] or [ONLY_PLACE]


THREADS_VARIABLE = "OMP_NUM_THREADS"
CPUS = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def worker_threads() -> int:
    """Return the number of threads for a worker, at least one.

    If the system does not report which processors share a core, each processor counts as a core.
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return usable_threads(cores_of(usable), _read(QUOTA))


def usable_threads(cores: int, quota: str) -> int:
    """Return the number of threads that the process can use.

    `quota` is the kernel's text: `max 100000`, or the microseconds of processor time in each period.
    """
    allowed, _, period = quota.partition(" ")
    if allowed.isdigit() and period.strip().isdigit():
        cores = min(cores, math.ceil(int(allowed) / int(period)))
    return max(1, cores - 1)


def cores_of(cpus: Iterable[int], root: Path = CPUS) -> int:
    """Return the number of cores. All hyper-threads of a core together compute no faster than one hyper-thread."""
    return len({_read(root / f"cpu{cpu}" / "topology" / "thread_siblings_list").strip() or str(cpu) for cpu in cpus})


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
