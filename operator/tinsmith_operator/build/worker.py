"""The template of the worker's pod, with the worker's arguments: from the spec, and from the plan beside it."""

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
"""Adapters are gathered from all ranks before they are written."""
GRACE_STEP_SECONDS = 30
"""Coarse, so that the StatefulSet does not change with every measurement."""

LATER_INPUTS = frozenset({"checkpointEnvironment", "checkpointSecret", "restart"})


@dataclass(frozen=True)
class PinnedImage:
    """reference: as somebody asked for it. digest: what that was when it first ran, if it came from a registry."""

    reference: str
    digest: str | None

    @property
    def runs(self) -> str:
        return self.digest or self.reference


@dataclass(frozen=True)
class WorkerPlan:
    """restart: the latest request to start anew, as its time was written; whoever runs without it is restarted."""

    worker_id: str
    image: PinnedImage
    replicas: int
    restart: str | None = None


def grace_seconds(session: TrainingSession) -> int:
    """How long the worker may take to stop: as measured, with room, unless the spec says otherwise."""
    override = session.spec.pod.termination_grace_period_seconds
    if override is not None:
        return override
    measured = 30 + 4 * (session.status.snapshot_seconds or 0)
    shortest = SHORTEST_DIVIDED_GRACE_SECONDS if session.spec.uses_ray else SHORTEST_GRACE_SECONDS
    return max(shortest, math.ceil(measured / GRACE_STEP_SECONDS) * GRACE_STEP_SECONDS)


def inputs_hash(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> str:
    """Of everything that somebody said of this pod.

    A pod with another hash must be restarted, but for `equivalent_hashes`. What the operator adds by itself is left
    out, so that a newer operator restarts nothing: its template waits for the next start. So are defaults, since a
    newer one may have more fields.
    """
    return _hashed(_inputs(session, installation, plan))


def equivalent_hashes(
    session: TrainingSession, installation: Installation, plan: WorkerPlan, pull_secrets: Sequence[Manifest]
) -> frozenset[str]:
    """Of pods that run what this one would, and were only told otherwise how a node gets the image.

    That is in the hash, as it was in that of the first operator: without it, each pod of then would be restarted once.
    pull_secrets: of the pod that is compared.
    """
    inputs = _inputs(session, installation, plan)
    spec = {name: value for name, value in inputs["spec"].items() if name != "pod"}
    hashes = set()
    ways = pull_variants(inputs["spec"].get("pod") or {}, pull_secrets)
    for pod, policy in itertools.product(ways, PULL_POLICIES):
        # A pod of which only its image is said is there without fields, and an image has a place of its own.
        for same in ({**spec, "pod": pod}, *(() if pod else (spec,))):
            hashes.add(_hashed({**inputs, "spec": same, "pullPolicy": policy}))
    return frozenset(hashes)


def spec_hash(session: TrainingSession, plan: WorkerPlan) -> str:
    """Of what the session's own user said that decides what runs: the rest is the installation's."""
    said = session.spec.model_dump(
        mode="json", exclude={"suspend": True, "storage": True, "pod": {"image", *PULL_FIELDS}}, exclude_defaults=True
    )
    asked = {
        "spec": {name: value for name, value in said.items() if value},
        "claim": session.claim_name,
        "worker": plan.worker_id,
        "image": plan.image.reference,
        "restart": plan.restart,
    }
    return fingerprint({name: value for name, value in asked.items() if value})


def _inputs(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> Manifest:
    said = session.spec.model_dump(
        mode="json", exclude={"suspend": True, "storage": True, "pod": {"image"}}, exclude_defaults=True
    )
    return {
        "spec": said,
        "claim": session.claim_name,
        "worker": plan.worker_id,
        "image": plan.image.reference,
        "pullPolicy": installation.trainer_image_pull_policy,
        "checkpointRoot": installation.checkpoint_root,
        "checkpointClaim": installation.checkpoint_claim,
        "checkpointEnvironment": dict(installation.checkpoint_environment),
        "checkpointSecret": installation.checkpoint_secret,
        "restart": plan.restart,
    }


def _hashed(inputs: Manifest) -> str:
    # What is said since a later version is in the hash only where it is said: its default restarts nobody.
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
    asked = {SPEC_ANNOTATION: spec_hash(session, plan)}
    return {
        "metadata": {**metadata, "annotations": {**metadata["annotations"], **asked}},
        "spec": build_pod_spec(spec.pod, grace_seconds(session), container, volumes),
    }


def worker_arguments(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> list[str]:
    """The image is named as it was asked for: the first start does not know its digest, and runs the same."""
    spec = session.spec
    options = {
        **model_options(spec.model),
        "volume": f"{JOURNAL_PATH}/worker",
        **listen_options(),
        "checkpoint-root": installation.checkpoint_root,
        "engine": spec.engine.value,
        "quantization": spec.quantization.value if spec.quantization is not None else None,
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
