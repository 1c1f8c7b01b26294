"""The Deployment that keeps a pool's samplers."""

from __future__ import annotations

from tinsmith_operator.build.container import (
    build_container,
    command_line,
    door_options,
    life_options,
    model_options,
)
from tinsmith_operator.build.metadata import child_metadata, fingerprint, sealed, selector_labels
from tinsmith_operator.build.pod import build_pod_metadata, build_pod_spec
from tinsmith_operator.build.token_server import server_arguments, server_variables, server_volumes
from tinsmith_operator.build.volumes import serving_volumes
from tinsmith_operator.installation import Installation
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.names import IMAGE_ANNOTATION
from tinsmith_operator.model.pool import SamplerPool

PROGRESS_MARGIN_SECONDS = 600
"""For finding a node and pulling the image, beside the time that the spec gives a sampler to load the model."""


def build_deployment(pool: SamplerPool, template: Manifest) -> Manifest:
    """A new sampler is ready before an old one goes. The seal is of all but the template, which has its own hash."""
    sealed_part = sealed(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": child_metadata(pool, pool.workload_name),
            "spec": {
                "replicas": pool.spec.replicas,
                "selector": {"matchLabels": selector_labels(pool)},
                "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "progressDeadlineSeconds": pool.spec.pod.startup_timeout_seconds + PROGRESS_MARGIN_SECONDS,
                "revisionHistoryLimit": 2,
            },
        }
    )
    return {**sealed_part, "spec": {**sealed_part["spec"], "template": template}}


def build_sampler_template(pool: SamplerPool, installation: Installation, restart: str | None) -> Manifest:
    """restart: the latest request to start anew. The image is noted as it was asked for: a webhook may put a mirror in
    its place."""
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
            **door_options(),
            "checkpoint-root": installation.checkpoint_root,
            "adapter-slots": spec.adapters.max_loaded,
            "max-rank": spec.adapters.max_rank,
            "max-sequence-length": spec.max_sequence_length,
            **life_options(pool.uid),
            "log-format": "json",
        }
    )
    return [*options, *server_arguments(spec)]


def sampler_inputs(pool: SamplerPool, installation: Installation, restart: str | None) -> str:
    """A hash of what somebody said of the pods; another one rolls them.

    Which image the installation starts samplers with is left out, so that another one waits for the next roll; an image
    that the spec names is in. So are defaults and the number of replicas left out.
    """
    said = pool.spec.model_dump(mode="json", exclude={"replicas"}, exclude_defaults=True)
    inputs = {
        "spec": said,
        "worker": pool.uid,
        "checkpointRoot": installation.checkpoint_root,
        "checkpointClaim": installation.checkpoint_claim,
        "checkpointEnvironment": dict(installation.checkpoint_environment),
        "checkpointSecret": installation.checkpoint_secret,
        "restart": restart,
    }
    return fingerprint({name: value for name, value in inputs.items() if value})


def _spread(pool: SamplerPool) -> Manifest:
    """A constraint of the spec says nothing of pods: it is about these."""
    selector = {"labelSelector": {"matchLabels": selector_labels(pool)}}
    constraints = [{**constraint, **selector} for constraint in pool.spec.pod.topology_spread_constraints]
    return {"topologySpreadConstraints": constraints} if constraints else {}
