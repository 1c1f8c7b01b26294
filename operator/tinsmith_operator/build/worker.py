"""The template of the worker's pod, the worker's arguments, and the hashes of a pod's inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import SPEC_ANNOTATION
from tinsmith_operator.api.training_session import Sampling, TrainingSession
from tinsmith_operator.build.metadata import fingerprint
from tinsmith_operator.build.parallelism import engine_variables, engine_volumes, parallelism_options
from tinsmith_operator.build.pod import (
    PULL_FIELDS,
    PULL_POLICIES,
    build_container,
    build_pod_metadata,
    build_pod_spec,
    command_line,
    identity_options,
    listen_options,
    model_options,
    pull_variants,
)
from tinsmith_operator.build.volumes import JOURNAL_PATH, worker_volumes
from tinsmith_operator.installation import Installation

SHORTEST_GRACE_SECONDS = 60
SHORTEST_DIVIDED_GRACE_SECONDS = 300
"""The shortest grace period of a worker with several ranks.

A worker with several ranks needs more time, because it gathers adapters from all ranks before it writes them.
"""
GRACE_STEP_SECONDS = 30
"""The step to which grace periods are rounded.

The step is large, so that not every measurement changes the StatefulSet.
"""

LATER_INPUTS = frozenset({"checkpointEnvironment", "checkpointSecret", "tracingEndpoint", "restart"})

NOT_OF_THE_POD = {"suspend": True, "storage": True, "idle": True, "active_deadline_seconds": True}
"""The fields of a session's spec that do not change its pod."""


@dataclass(frozen=True)
class PinnedImage:
    """An image.

    - `reference`: the name that was requested.
    - `digest`: set after the first run of an image from a registry.
    """

    reference: str
    digest: str | None

    @property
    def runs(self) -> str:
        return self.digest or self.reference


@dataclass(frozen=True)
class WorkerPlan:
    """The image, the worker ID and the other values with which the worker starts.

    `restart` is the latest restart request. A pod that was started before the request is restarted.
    """

    worker_id: str
    image: PinnedImage
    replicas: int
    restart: str | None = None


def grace_seconds(session: TrainingSession) -> int:
    """Return the pod's grace period: the value in the spec, or four times the measured snapshot time plus 30 s."""
    override = session.spec.pod.termination_grace_period_seconds
    if override is not None:
        return override
    measured = 30 + 4 * (session.status.snapshot_seconds or 0)
    shortest = SHORTEST_DIVIDED_GRACE_SECONDS if session.spec.uses_ray else SHORTEST_GRACE_SECONDS
    return max(shortest, math.ceil(measured / GRACE_STEP_SECONDS) * GRACE_STEP_SECONDS)


def inputs_hash(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> str:
    """Return a hash of the pod's inputs: the spec, and the installation's settings for pods.

    A pod with a different hash must be restarted, unless `equivalent_hashes` contains the pod's hash. The hash leaves
    out everything that the operator itself adds, so a newer operator does not restart workers. Default values are left
    out too, because a newer operator may have additional fields with defaults.
    """
    return _hashed(_inputs(session, installation, plan))


def equivalent_hashes(
    session: TrainingSession, installation: Installation, plan: WorkerPlan, pull_secrets: Sequence[Manifest]
) -> frozenset[str]:
    """Return the hashes of pods that run the same containers.

    Pods with equivalent hashes differ only in how a node pulls the image.

    `pull_secrets` are the pull Secrets of the live pod.
    """
    inputs = _inputs(session, installation, plan)
    spec = {name: value for name, value in inputs["spec"].items() if name != "pod"}
    hashes = set()
    ways = pull_variants(inputs["spec"].get("pod") or {}, pull_secrets)
    for pod, policy in itertools.product(ways, PULL_POLICIES):
        # A spec that sets only the pod's image has an empty `pod` here, because the image is hashed separately.
        for same in ({**spec, "pod": pod}, *(() if pod else (spec,))):
            hashes.add(_hashed({**inputs, "spec": same, "pullPolicy": policy}))
    return frozenset(hashes)


def spec_hash(session: TrainingSession, plan: WorkerPlan) -> str:
    """Return a hash of the inputs that come from the session's spec. All other inputs come from the installation."""
    spec = session.spec.model_dump(
        mode="json", exclude={**NOT_OF_THE_POD, "pod": {"image", *PULL_FIELDS}}, exclude_defaults=True
    )
    inputs = {
        "spec": {name: value for name, value in spec.items() if value},
        "claim": session.claim_name,
        "worker": plan.worker_id,
        "image": plan.image.reference,
        "restart": plan.restart,
    }
    return fingerprint({name: value for name, value in inputs.items() if value})


def _inputs(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    spec = session.spec.model_dump(mode="json", exclude={**NOT_OF_THE_POD, "pod": {"image"}}, exclude_defaults=True)
    return {
        "spec": spec,
        "claim": session.claim_name,
        "worker": plan.worker_id,
        "image": plan.image.reference,
        "pullPolicy": installation.trainer_image_pull_policy,
        "checkpointRoot": installation.checkpoint_root,
        "checkpointClaim": installation.checkpoint_claim,
        "checkpointEnvironment": dict(installation.checkpoint_environment),
        "checkpointSecret": installation.checkpoint_secret,
        "tracingEndpoint": installation.tracing_endpoint,
        "restart": plan.restart,
    }


def _hashed(inputs: Manifest) -> str:
    # The hash contains inputs of a later version only if they are set. Their defaults restart no worker.
    return fingerprint({name: value for name, value in inputs.items() if name not in LATER_INPUTS or value})


def worker_template(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    spec = session.spec
    volumes = engine_volumes(spec, worker_volumes(session, installation))
    container = build_container(
        spec,
        installation,
        plan.image.runs,
        worker_arguments(session, installation, plan),
        volumes,
        variables=engine_variables(spec),
        processes=spec.ranks_per_node,
    )
    metadata = build_pod_metadata(session, spec.pod, inputs_hash(session, installation, plan), plan.restart)
    annotations = {SPEC_ANNOTATION: spec_hash(session, plan)}
    return {
        "metadata": {**metadata, "annotations": {**metadata["annotations"], **annotations}},
        "spec": build_pod_spec(spec.pod, grace_seconds(session), container, volumes),
    }


def worker_arguments(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> list[str]:
    """Return the worker's arguments.

    The arguments contain the requested name of the image, because the digest is not known before the first start.
    """
    spec = session.spec
    options = {
        **model_options(spec.model),
        "volume": f"{JOURNAL_PATH}/worker",
        **listen_options(),
        "checkpoint-root": installation.checkpoint_root,
        "engine": spec.engine.value,
        "quantization": spec.quantization.value if spec.quantization is not None else None,
        "numerics": spec.numerics.value if spec.numerics is not None else None,
        **parallelism_options(spec),
        "adapter-slots": spec.adapters.slots,
        "model-places": spec.adapters.model_places,
        "max-rank": spec.adapters.max_rank,
        "max-sequence-length": spec.max_sequence_length,
        **identity_options(plan.worker_id),
        "image": plan.image.reference,
        "log-format": "json",
    }
    sampling = "--sampling" if spec.sampling is Sampling.COLOCATED else "--no-sampling"
    return [*command_line(options), sampling]
