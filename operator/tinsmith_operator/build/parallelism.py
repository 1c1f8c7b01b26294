"""The worker's options for ranks that share a model, and the variables and volumes for such ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tinsmith_operator.api.base import Manifest, parse_quantity
from tinsmith_operator.api.training_session import Engine, TrainingSessionSpec
from tinsmith_operator.build.volumes import (
    HUB_CACHE_LIMIT,
    HUB_CACHE_PATH,
    SHARED_MEMORY_PATH,
    Mounted,
    claim_source,
    in_memory,
    scratch,
)

RAY_LIMIT = "32Gi"
"""The room for Ray's logs, and for objects that do not fit into shared memory."""
LEAST_SHARED_MEMORY = 2**30
MEBIBYTE = 2**20

VARIABLES = {
    # Off, because Ray would end processes above a share of the node's memory. Only the container's limit must count.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
OWN_VARIABLES: Mapping[Engine, Mapping[str, str]] = {
    Engine.NEMO_RL: {"NRL_MEGATRON_CHECKPOINT_DIR": f"{HUB_CACHE_PATH}/megatron"},
    Engine.MILES: {},
}
GPU_VARIABLES = {
    # Tensor parallelism overlaps communication with computing only if kernels start in order.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_DEBUG": "WARN",
}


def parallelism_options(spec: TrainingSessionSpec) -> dict[str, str | int | None]:
    """Return the options. If the session's engine does not divide the model, return no options."""
    if not spec.engine.divides:
        return {}
    parallelism = spec.divided
    return {
        "nodes": parallelism.nodes,
        "gpus-per-node": spec.gpus_per_node,
        "ranks": spec.ranks if spec.uses_ray else 0,
        "tensor-parallel": parallelism.tensor,
        "pipeline-parallel": parallelism.pipeline,
        "context-parallel": parallelism.context,
        "expert-parallel": parallelism.expert,
    }


def engine_variables(spec: TrainingSessionSpec) -> list[Manifest]:
    """Return the engine's variables for each pod.

    If the user sets a variable with the same name, the user's value takes precedence.
    """
    if not spec.engine.divides:
        return []
    variables = {**VARIABLES, **OWN_VARIABLES[spec.engine], **(GPU_VARIABLES if spec.gpus_per_node else {})}
    return [{"name": name, "value": value} for name, value in variables.items()]


def engine_volumes(spec: TrainingSessionSpec, volumes: Sequence[Mounted]) -> list[Mounted]:
    """Return the volumes, together with the engine's volumes.

    A volume of the engine replaces a volume at the same path.
    """
    if not spec.engine.divides:
        return list(volumes)
    cache = claim_source(spec.model_cache.claim_name) if spec.model_cache is not None else scratch(HUB_CACHE_LIMIT)
    own = [Mounted("model-cache", HUB_CACHE_PATH, cache)]
    if spec.uses_ray:
        own.append(Mounted("ray", "/tmp/ray", scratch(RAY_LIMIT)))
        own.append(Mounted("shared-memory", SHARED_MEMORY_PATH, in_memory(shared_bytes(spec))))
    replaced = {volume.path for volume in own}
    return [*(volume for volume in volumes if volume.path not in replaced), *own]


def shared_bytes(spec: TrainingSessionSpec) -> int:
    """Return the size of /dev/shm: a quarter of the pod's memory.

    The ranks on one node communicate through /dev/shm.
    """
    shared_memory = spec.pod.shared_memory
    if shared_memory is not None:
        return int(parse_quantity(shared_memory))
    memory = spec.resources.limits.get("memory", spec.resources.requests.get("memory", 0))
    return max(LEAST_SHARED_MEMORY, int(parse_quantity(memory)) // 4 // MEBIBYTE * MEBIBYTE)
