"""How Ray is started in the pods of a group."""

from __future__ import annotations

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.spec import TrainingSessionSpec
from tinsmith_operator.build.container import literally
from tinsmith_operator.installation import Installation

VERSION_ON_CPUS = "2.60.0"
VERSION_ON_GPUS = "2.56.1"
"""Of the Ray in the project's images for engine nemo-rl: with megatron-core alone, and with NeMo RL."""

GCS_PORT = 6379
"""Of the head's directory of the group, where members join."""
RAYLET_PORT = 6380
"""Of the process that stands for Ray in each pod: it listens while the pod belongs to the group."""

OWN_ADDRESS = "POD_IP"
POD_ADDRESS: Manifest = {"name": OWN_ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}

# Sockets and files are many, and some nodes allow fewer. What a former run of the container left would be taken for one
# that still runs.
PREPARE_RAY = """ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
rm -rf /tmp/ray/*"""


def ray_version(spec: TrainingSessionSpec, installation: Installation) -> str:
    own = VERSION_ON_GPUS if spec.gpus_per_node else VERSION_ON_CPUS
    return installation.ray_version or own


def shell(script: str, name: str) -> list[str]:
    """A container's command, which gets the container's arguments; name: what the shell calls itself in errors."""
    return ["/bin/bash", "-ec", literally(script), name]


def start_options(threads: int, spec: TrainingSessionSpec, shared_memory_bytes: int) -> str:
    """Of `ray start` in any pod. Ray counts one CPU for each rank, however many threads that has."""
    options = {
        "node-manager-port": RAYLET_PORT,
        "num-cpus": max(threads, spec.ranks_per_node),
        "num-gpus": spec.gpus_per_node,
        # The ranks' own exchanges use shared memory too.
        "object-store-memory": shared_memory_bytes // 2,
    }
    return " ".join(["--disable-usage-stats", *(f"--{name}={value}" for name, value in options.items())])
