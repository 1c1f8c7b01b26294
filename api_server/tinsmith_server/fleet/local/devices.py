"""The devices that workers of this machine run on, one worker of each model for each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinsmith_server.fleet.local.threads import THREADS_VARIABLE, worker_threads
from tinsmith_server.settings import CPU

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's device, among those of a model's workers.

    The first place has the id, and so the volume, of the only worker of a server without `devices`. Without a device
    the worker takes what it finds. `cpu_workers` share this machine's processors.
    """

    number: int = 0
    device: str | None = None
    cpu_workers: int = 1

    @property
    def flags(self) -> tuple[str, ...]:
        """A worker that sees no GPU would take the CPU without a word, unless it is told to use one."""
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
    """Return one place for each device, or the only place of a server without `devices`."""
    cpu_workers = devices.count(CPU)
    return [Place(number, device, cpu_workers) for number, device in enumerate(devices)] or [ONLY_PLACE]
