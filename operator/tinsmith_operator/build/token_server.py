"""What a sampler is told of the server that it runs beside itself, and what that needs in the pod."""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith_operator.build.container import command_line
from tinsmith_operator.build.volumes import SHARED_MEMORY_PATH, Mounted, in_memory, scratch
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.pool_spec import SamplerPoolSpec
from tinsmith_operator.model.quantity import parse_quantity

SCRATCH_PATH = "/var/lib/tinsmith/scratch"
SCRATCH_LIMIT = "256Gi"
"""For the adapters of a replica, which the server reads again from there, and for what it compiles."""
SHARED_MEMORY_BYTES = 16 * 2**30
"""Of /dev/shm, by which the processes of one server speak to each other. What lies there counts as memory."""

VARIABLES = {
    # Else kernels are compiled into HOME and /tmp, which are small.
    "XDG_CACHE_HOME": f"{SCRATCH_PATH}/cache",
    "TRITON_CACHE_DIR": f"{SCRATCH_PATH}/cache/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH_PATH}/cache/inductor",
    "FLASHINFER_WORKSPACE_BASE": f"{SCRATCH_PATH}/cache",
}


def server_arguments(spec: SamplerPoolSpec) -> list[str]:
    """Nothing of a pool that runs no server."""
    if not spec.runs_a_server:
        return []
    options = {
        "engine": spec.engine.value,
        "gpus": spec.gpus,
        "scratch": SCRATCH_PATH,
        "server-start-timeout-seconds": spec.pod.startup_timeout_seconds,
    }
    return [*command_line(options), *(f"--server-argument={word}" for word in spec.server_arguments)]


def server_variables(spec: SamplerPoolSpec) -> list[Manifest]:
    """What the user says of one of them wins."""
    return [{"name": name, "value": value} for name, value in VARIABLES.items()] if spec.runs_a_server else []


def server_volumes(spec: SamplerPoolSpec, volumes: Sequence[Mounted]) -> list[Mounted]:
    """What the server needs beside these, or in place of those at the same path."""
    if not spec.runs_a_server:
        return list(volumes)
    said = spec.pod.shared_memory
    shared_bytes = SHARED_MEMORY_BYTES if said is None else int(parse_quantity(said))
    own = [
        Mounted("scratch", SCRATCH_PATH, scratch(SCRATCH_LIMIT)),
        Mounted("shared-memory", SHARED_MEMORY_PATH, in_memory(shared_bytes)),
    ]
    replaced = {volume.path for volume in own}
    return [*(volume for volume in volumes if volume.path not in replaced), *own]
