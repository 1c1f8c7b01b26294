"""How much memory keys and values may take: what the operator says, else a share of what the device has free.

It is asked once, when the weights are in place. A sampler that could not hold one sequence of full length is refused
then, instead of failing samples later.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.torch_model.loading import TorchModel

SHARE_BESIDE_AN_ENGINE, SHARE_ALONE = 0.25, 0.8
"""Of a GPU's free memory. Training needs most of it for activations; a sampler alone leaves some for its own."""
CPU_SHARE, CPU_BYTES = 0.25, 8 << 30
"""Of the host's, and at most: it belongs to other processes, too."""
GIB = 1 << 30

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def kv_memory_bytes(torch_model: TorchModel, given: int | None, *, alone: bool) -> int:
    """`given` by the operator, or a share of what is free; `alone`: nothing else computes on the device.

    Raises ServerError where one row of the model's full length does not fit.
    """
    tokens = torch_model.info.max_sequence_length
    row_bytes = tokens * ForwardPass(torch_model).geometry.bytes_per_token
    free = free_bytes(torch_model.device)
    return chosen_bytes(given, row_bytes, tokens, free, shared_bytes(torch_model.device.type, free, alone=alone))


def chosen_bytes(given: int | None, row_bytes: int, row_tokens: int, free: int, share: int) -> int:
    """The memory for rows of `row_tokens` at most, which take `row_bytes` each: a share of what is free.

    Raises ServerError.
    """
    room, where = (free, "are free on the device") if given is None else (given, "are what --kv-cache-bytes allows")
    if row_bytes > room:
        raise ServerError(
            f"Keys and values of one sequence of {row_tokens} tokens, the longest that is served, take "
            f"{row_bytes / GIB:.2f} GiB, and {room / GIB:.2f} GiB {where}. Lower --max-sequence-length, "
            f"or give more memory, {row_bytes} bytes at least."
        )
    return given if given is not None else max(row_bytes, share)


def shared_bytes(device_type: str, free: int, *, alone: bool) -> int:
    """The sampler's share of what is free."""
    if device_type == "cpu":
        return min(int(free * CPU_SHARE), CPU_BYTES)
    return int(free * (SHARE_ALONE if alone else SHARE_BESIDE_AN_ENGINE))


def free_bytes(device: torch.device) -> int:
    """Of a GPU, or of the host's memory what neither the machine nor a container's limit keeps from this process."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _available_bytes(MEMINFO)
    room = cgroup_room_bytes(CGROUP)
    return available if room is None else min(available, room)


def cgroup_room_bytes(cgroup: Path) -> int | None:
    """What is left below the limit of a control group, or None. File pages that may go count as free."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        pages = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(pages.get("inactive_file", 0)))


def _available_bytes(meminfo: Path) -> int:
    """Where the kernel does not say, half of all that there is."""
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    [line] = [line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
    return int(line.split()[1]) * 1024
