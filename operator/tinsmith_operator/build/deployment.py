"""The Deployment of a pool's samplers and token server, and the PodDisruptionBudget of the pool."""

from __future__ import annotations

from collections.abc import Sequence

from tinsmith_operator.api.base import Manifest, parse_quantity
from tinsmith_operator.api.names import IMAGE_ANNOTATION
from tinsmith_operator.api.sampler_pool import SamplerPool, SamplerPoolSpec
from tinsmith_operator.build.metadata import child_metadata, fingerprint, sealed, selector_labels
from tinsmith_operator.build.pod import (
    build_container,
    build_pod_metadata,
    build_pod_spec,
    command_line,
    identity_options,
    listen_options,
    model_options,
    pull_variants,
)
from tinsmith_operator.build.volumes import SHARED_MEMORY_PATH, Mounted, in_memory, scratch, serving_volumes
from tinsmith_operator.installation import Installation

PROGRESS_MARGIN_SECONDS = 600
"""The time to find a node and to pull the image.

The Deployment's progress deadline is the sum of this time and the spec's `startup_timeout_seconds`.
"""

NOT_OF_THE_PODS = {"replicas", "idle", "active_deadline_seconds"}
"""The fields of a pool's spec that do not change its pods."""

SCRATCH_PATH = "/var/lib/tinsmith/scratch"
SCRATCH_LIMIT = "256Gi"
"""The disk space of a replica for compiled kernels and for the adapters that the server reads from disk."""
SHARED_MEMORY_BYTES = 16 * 2**30
"""The size of /dev/shm: the processes of one server communicate through shared memory.

The content of /dev/shm counts as memory of the pod.
"""

VARIABLES = {
    # Without these variables, compiled kernels are stored in HOME and /tmp, which are small.
    "XDG_CACHE_HOME": f"{SCRATCH_PATH}/cache",
    "TRITON_CACHE_DIR": f"{SCRATCH_PATH}/cache/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH_PATH}/cache/inductor",
    "FLASHINFER_WORKSPACE_BASE": f"{SCRATCH_PATH}/cache",
}


def build_deployment(pool: SamplerPool, replicas: int, template: Manifest) -> Manifest:
    """Return the Deployment. A new sampler must be ready before an old sampler stops.

    The pod template contains a hash of its own content.
    """
    sealed_part = sealed(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": child_metadata(pool, pool.workload_name),
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": selector_labels(pool)},
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "progressDeadlineSeconds": pool.spec.pod.startup_timeout_seconds + PROGRESS_MARGIN_SECONDS,
                "revisionHistoryLimit": 2,
            },
        }
    )
    return {**sealed_part, "spec": {**sealed_part["spec"], "template": template}}


def build_sampler_template(pool: SamplerPool, installation: Installation, restart: str | None) -> Manifest:
    """Return the template. `restart` is the latest request for a restart.

    An annotation records the image that was requested, because a webhook may replace the image by a mirror.
    """
    spec, image = pool.spec, pool.spec.pod.image or installation.trainer_image
    volumes = server_volumes(spec, serving_volumes(pool.workload_name, spec, installation))
    container = build_container(
        spec,
        installation,
        image,
        sampler_arguments(pool, installation),
        volumes,
        variables=server_variables(spec),
    )
    metadata = build_pod_metadata(pool, spec.pod, sampler_inputs(pool, installation, restart), restart)
    grace_seconds = spec.pod.termination_grace_period_seconds
    return {
        "metadata": {**metadata, "annotations": {**metadata["annotations"], IMAGE_ANNOTATION: image}},
        "spec": {**build_pod_spec(spec.pod, grace_seconds, container, volumes), **_spread(pool)},
    }


def sampler_arguments(pool: SamplerPool, installation: Installation) -> list[str]:
    spec = pool.spec
    options = command_line(
        {
            "role": "sampler",
            **model_options(spec.model),
            **listen_options(),
            "checkpoint-root": installation.checkpoint_root,
            "adapter-slots": spec.adapters.max_loaded,
            "max-rank": spec.adapters.max_rank,
            "max-sequence-length": spec.max_sequence_length,
            **identity_options(pool.uid),
            "log-format": "json",
        }
    )
    return [*options, *server_arguments(spec)]


def sampler_inputs(pool: SamplerPool, installation: Installation, restart: str | None) -> str:
    """Return a hash of the pods' inputs. When the hash changes, the Deployment replaces the pods.

    If the spec names an image, the hash includes the image. The hash does not include the installation's default image,
    so a new default image takes effect only at the next rollout. Default values and the number of replicas are not in
    the hash, either.
    """
    spec = pool.spec.model_dump(mode="json", exclude=NOT_OF_THE_PODS, exclude_defaults=True)
    return _hashed(spec, pool, installation, restart)


def equivalent_sampler_hashes(
    pool: SamplerPool, installation: Installation, restart: str | None, pull_secrets: Sequence[Manifest]
) -> frozenset[str]:
    """Return the hashes of pods that run the same containers.

    Pods with equivalent hashes differ only in how a node pulls the image.

    `pull_secrets` are the pull Secrets of the live template.
    """
    spec = pool.spec.model_dump(mode="json", exclude=NOT_OF_THE_PODS, exclude_defaults=True)
    ways = pull_variants(spec.pop("pod", {}), pull_secrets)
    specs = [{**spec, "pod": pod} if pod else spec for pod in ways]
    return frozenset(_hashed(spec, pool, installation, restart) for spec in specs)


def _hashed(spec: Manifest, pool: SamplerPool, installation: Installation, restart: str | None) -> str:
    inputs = {
        "spec": spec,
        "worker": pool.uid,
        "checkpointRoot": installation.checkpoint_root,
        "checkpointClaim": installation.checkpoint_claim,
        "checkpointEnvironment": dict(installation.checkpoint_environment),
        "checkpointSecret": installation.checkpoint_secret,
        "tracingEndpoint": installation.tracing_endpoint,
        "restart": restart,
    }
    return fingerprint({name: value for name, value in inputs.items() if value})


def build_budget(pool: SamplerPool) -> Manifest:
    """Return the budget. The budget allows the eviction of one working sampler at a time.

    A sampler that does not work may always be evicted.
    """
    return sealed(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": child_metadata(pool, pool.workload_name),
            "spec": {
                "maxUnavailable": 1,
                "selector": {"matchLabels": selector_labels(pool)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        }
    )


def _spread(pool: SamplerPool) -> Manifest:
    """Return the topology constraints of the spec, with a selector for the pool's pods."""
    selector = {"labelSelector": {"matchLabels": selector_labels(pool)}}
    constraints = [{**constraint, **selector} for constraint in pool.spec.pod.topology_spread_constraints]
    return {"topologySpreadConstraints": constraints} if constraints else {}


def server_arguments(spec: SamplerPoolSpec) -> list[str]:
    """Return the arguments for the server. For a pool without a server, return no arguments."""
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
    """Return the variables for the server.

    If the user sets a variable with the same name, the user's value takes precedence.
    """
    return [{"name": name, "value": value} for name, value in VARIABLES.items()] if spec.runs_a_server else []


def server_volumes(spec: SamplerPoolSpec, volumes: Sequence[Mounted]) -> list[Mounted]:
    """Return the volumes, together with the server's volumes.

    A volume of the server replaces a volume at the same path.
    """
    if not spec.runs_a_server:
        return list(volumes)
    shared_memory = spec.pod.shared_memory
    shared_bytes = SHARED_MEMORY_BYTES if shared_memory is None else int(parse_quantity(shared_memory))
    own = [
        Mounted("scratch", SCRATCH_PATH, scratch(SCRATCH_LIMIT)),
        Mounted("shared-memory", SHARED_MEMORY_PATH, in_memory(shared_bytes)),
    ]
    replaced = {volume.path for volume in own}
    return [*(volume for volume in volumes if volume.path not in replaced), *own]
