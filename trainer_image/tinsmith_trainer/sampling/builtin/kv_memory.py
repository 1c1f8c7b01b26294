"""The memory for keys and values: a size that the operator sets, or a share of the device's free memory.

On a GPU the share also holds the stacks of adapters and the recorded decode steps. The sizes are decided once, when the
weights are loaded. Many models allow longer sequences than fit in memory. If a
sequence of full length does not fit, the sampler serves only shorter sequences, and the log states the largest length.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.sampling.builtin.kv_cache import RowGeometry
from tinsmith_trainer.sampling.builtin.settings import BuiltinSamplerSettings
from tinsmith_trainer.sampling.builtin.steps.memory import StepMemory, StepSizes

log = structlog.get_logger(__name__)

SHARE_WITH_ENGINE, SHARE_ALONE = 0.25, 0.8
"""The shares of a GPU's free memory, with and without an engine in the same process.

Training needs most of the memory for activations. A sampler that is alone on a GPU needs some memory for activations.
"""
CPU_SHARE, CPU_BYTES = 0.25, 8 << 30
"""The share of the host's memory, and the limit on this share. Other processes also need memory of the host."""
GIB = 1 << 30
SHORTEST_ROW_TOKENS = 64

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The memory in bytes.

    `longest_row_tokens` is the length of the longest sequence that the sampler serves. The length of a sequence is
    limited by the model's context and by the memory. `steps` is the memory next to keys and values.
    """

    nbytes: int
    longest_row_tokens: int
    steps: StepMemory | None = None

    def within(self, settings: BuiltinSamplerSettings) -> BuiltinSamplerSettings:
        """Return the settings with the limits of this memory."""
        limited = replace(settings, kv_cache_bytes=self.nbytes, longest_row_tokens=self.longest_row_tokens)
        if self.steps is None:
            return limited
        return replace(
            limited,
            stacked_adapter_bytes=self.steps.stacked_adapter_bytes,
            recorded_steps=self.steps.recorded_steps,
        )


def kv_memory(
    geometry: RowGeometry, context: int, configured: int | None, *, alone: bool, sizes: StepSizes | None = None
) -> KvMemory:
    """Return the configured memory, or a share of the free memory. `alone`: no other program computes on the device.

    Sequences have at most `context` tokens. `sizes` are those of a decode step; without them the share holds only keys
    and values. Raises ServerError if the memory is too small for the shortest row.
    """
    free = free_bytes(geometry.device)
    share = shared_bytes(geometry.device.type, free, alone=alone)
    steps = sizes.memory(share, geometry.row_bytes(context)) if sizes and geometry.device.type != "cpu" else None
    chosen = chosen_bytes(configured, geometry, context, free, share - (steps.nbytes if steps else 0))
    longest = min(context, geometry.tokens_in(chosen))
    log.info(
        "planned the sampler's memory",
        kv_cache_bytes=chosen,
        stacked_adapter_bytes=steps and steps.stacked_adapter_bytes,
        recorded_steps=steps and steps.recorded_steps,
        recorded_step_bytes=steps and steps.recorded_bytes,
    )
    if longest < context:
        log.warning(
            "samples are shorter than the model's context: memory for keys and values holds no more",
            tokens=longest,
            context=context,
            kv_cache_bytes=chosen,
        )
    return KvMemory(chosen, longest, steps)


def chosen_bytes(configured: int | None, geometry: RowGeometry, context: int, free: int, share: int) -> int:
    """Return a share of the free memory, or the size of one row of the whole context.

    The size of one row is chosen if the row is larger than the share and fits in half of the free memory. Raises
    ServerError if the memory is too small for the shortest row.
    """
    row_bytes = geometry.row_bytes(context)
    chosen = configured if configured is not None else max(share, row_bytes if row_bytes <= free // 2 else 0)
    least = geometry.row_bytes(SHORTEST_ROW_TOKENS)
    if chosen < least:
        where = "what --kv-cache-bytes allows" if configured is not None else "the sampler's share of what is free"
        raise ServerError(
            f"Keys and values of {SHORTEST_ROW_TOKENS} tokens take {least} bytes, and {where} is {chosen}. "
            f"Give more memory, or --no-sampling where nothing is to be sampled."
        )
    return chosen


def shared_bytes(device_type: str, free: int, *, alone: bool) -> int:
    """Return the sampler's share of the free memory."""
    if device_type == "cpu":
        return min(int(free * CPU_SHARE), CPU_BYTES)
    return int(free * (SHARE_ALONE if alone else SHARE_WITH_ENGINE))


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of the host.

    For the host, the limits of the machine and of the container apply.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _available_bytes(MEMINFO)
    room = cgroup_room_bytes(CGROUP)
    return available if room is None else min(available, room)


def cgroup_room_bytes(cgroup: Path) -> int | None:
    """Return the bytes that remain below the limit of a control group, or None if the group has no limit.

    Cached file pages count as free, because the kernel can drop such pages.
    """
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        pages = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(pages.get("inactive_file", 0)))


def _available_bytes(meminfo: Path) -> int:
    """Return the available bytes, or half of all memory if the kernel does not report available memory."""
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    [line] = [line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
    return int(line.split()[1]) * 1024
