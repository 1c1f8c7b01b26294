"""The devices that workers of this machine run on, one worker of each model for each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinsmith_server.fleet.local.threads import THREADS_VARIABLE, worker_threads
from tinsmith_server.settings import CPU

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's device. The first place of a model has the id that the only worker had, and so its volume."""

    number: int = 0
    device: str | None = None
    """None: the worker takes what it finds."""
    processors: int = 1
    """Workers that share this machine's processors."""

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
            return {VISIBLE_GPUS: "", THREADS_VARIABLE: str(max(1, worker_threads() // self.processors))}
        return {VISIBLE_GPUS: self.device}


ONLY = Place()


def places(devices: Sequence[str]) -> list[Place]:
    processors = max(1, sum(device == CPU for device in devices))
    return [Place(number, device, processors) for number, device in enumerate(devices)] or [ONLY]
