"""The template of the worker's pod, and what the worker is told."""

from __future__ import annotations

from tinsmith_operator.build.container import (
    build_container,
    command_line,
    door_options,
    life_options,
    model_options,
)
from tinsmith_operator.build.parallelism import engine_variables, engine_volumes, parallelism_options
from tinsmith_operator.build.plan import WorkerPlan, grace_seconds, inputs_hash
from tinsmith_operator.build.pod import build_pod_metadata, build_pod_spec
from tinsmith_operator.build.volumes import JOURNAL_PATH, worker_volumes
from tinsmith_operator.installation import Installation
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.session import TrainingSession
from tinsmith_operator.model.spec import Sampling


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
    return {
        "metadata": build_pod_metadata(session, spec.pod, inputs_hash(session, installation, plan), plan.restart),
        "spec": build_pod_spec(spec.pod, grace_seconds(session), container, volumes),
    }


def worker_arguments(session: TrainingSession, installation: Installation, plan: WorkerPlan) -> list[str]:
    """The image is told as it was asked for: the first start does not know its digest, and runs the same."""
    spec = session.spec
    options = {
        **model_options(spec.model),
        "volume": f"{JOURNAL_PATH}/worker",
        **door_options(),
        "checkpoint-root": installation.checkpoint_root,
        "engine": spec.engine.value,
        **parallelism_options(spec),
        "adapter-slots": spec.adapters.slots,
        "max-rank": spec.adapters.max_rank,
        "max-sequence-length": spec.max_sequence_length,
        **life_options(plan.worker_id),
        "image": plan.image.reference,
        "log-format": "json",
    }
    sampling = "--sampling" if spec.sampling is Sampling.COLOCATED else "--no-sampling"
    return [*command_line(options), sampling]
