"""The checkpoints of a sweep, and the sampling clients for these checkpoints."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, cast

import tinker

from tinsmith.training.checkpoints.server_states import ServerStates
from tinsmith.training.checkpoints.store import CheckpointStore
from tinsmith.training.errors import EvaluationError, StateGone
from tinsmith.training.server_files import PURPOSE

CheckpointKind = Literal["sampler", "training", "base"]
STEP_AT_START = re.compile(r"step-(\d+)")
"""The name of a state that a CheckpointManager saved, without the hexadecimal digits at the end. """
NUMBER_AT_END = re.compile(r"(\d+)\D*$")

Connect = Callable[[], tinker.ServiceClient]
"""A function that opens a session on the server. The session for a checkpoint ends when the checkpoint is evaluated."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights to evaluate. `path` is a `tinker://` path, or the name of a base model.

    `step` is None if the step is unknown.
    """

    path: str
    label: str
    step: int | None
    kind: CheckpointKind


def at_path(path: str) -> Checkpoint:
    """Return the checkpoint at a path. The step of a checkpoint with the name `step-N…` is N.

    For other names, the step is the last number in the name.

    Raises EvaluationError for a path without weights.
    """
    try:
        parsed = tinker.ParsedCheckpointTinkerPath.from_tinker_path(path)
    except ValueError as error:
        raise EvaluationError(str(error)) from error
    if parsed.checkpoint_type == "external":
        raise EvaluationError(
            f"{path} is an export, which cannot be sampled from; upload its files with `tinsmith import`"
        )
    name = path.rpartition("/")[2]
    return Checkpoint(path, name, _number_in(name), parsed.checkpoint_type)


def of_base_model(name: str) -> Checkpoint:
    """Return the base model without an adapter. The base model serves as the baseline."""
    return Checkpoint(name, name, None, "base")


def in_root(url: str) -> list[Checkpoint]:
    """Return the checkpoints of a CheckpointManager, in the order of their steps.

    Raises EvaluationError if no checkpoints exist.
    """
    found = [
        Checkpoint(metadata.state_path, f"step {metadata.step}", metadata.step, "training")
        for metadata in CheckpointStore(url).readable()
    ]
    if not found:
        raise EvaluationError(f"there are no checkpoints in {url}")
    return found


def of_run(rest: tinker.RestClient, run_id: str) -> list[Checkpoint]:
    """Return the checkpoints of the run on the server, oldest first.

    If a sampler and a state have the same name, only the sampler is returned.

    Raises EvaluationError if no checkpoints exist.
    """
    try:
        listed = sorted(rest.list_checkpoints(run_id).result().checkpoints, key=lambda checkpoint: checkpoint.time)
    except tinker.NotFoundError as error:
        raise EvaluationError(f"the server has no run {run_id}") from error
    found = [at_path(checkpoint.tinker_path) for checkpoint in listed if checkpoint.checkpoint_type != "external"]
    samplers = {checkpoint.label for checkpoint in found if checkpoint.kind == "sampler"}
    chosen = [checkpoint for checkpoint in found if checkpoint.kind == "sampler" or checkpoint.label not in samplers]
    if not chosen:
        raise EvaluationError(f"the server has no checkpoints of run {run_id}")
    return chosen


def require_different(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints without duplicates, in the given order."""
    return list({checkpoint.path: checkpoint for checkpoint in checkpoints}.values())


@asynccontextmanager
async def sampler_of(connect: Connect, checkpoint: Checkpoint) -> AsyncIterator[tinker.SamplingClient]:
    """Yield a sampling client for the checkpoint. Raises StateGone, and the errors of the SDK.

    A training state has no sampler. So for a training state, a training client is created, and the weights are saved
    without a name. The training client and the unnamed weights exist only until the end of the session.
    """
    service = await asyncio.to_thread(connect)
    try:
        yield await _sampling_client(service, checkpoint)
    finally:
        await service.close("success")


async def _sampling_client(service: tinker.ServiceClient, checkpoint: Checkpoint) -> tinker.SamplingClient:
    if checkpoint.kind == "base":
        return cast(tinker.SamplingClient, await service.create_sampling_client(base_model=checkpoint.path))
    if checkpoint.kind == "training":
        await asyncio.to_thread(ServerStates.of(service).require, checkpoint.path)
        training_client = await service.create_training_client_from_state(
            checkpoint.path, user_metadata={PURPOSE: "evaluation"}
        )
        return cast(tinker.SamplingClient, await training_client.save_weights_and_get_sampling_client())
    try:
        return cast(tinker.SamplingClient, await service.create_sampling_client(model_path=checkpoint.path))
    except tinker.NotFoundError as error:
        raise StateGone(f"the server has no {checkpoint.path}: it was deleted or has expired") from error


def _number_in(name: str) -> int | None:
    matched = STEP_AT_START.match(name) or NUMBER_AT_END.search(name)
    return int(matched[1]) if matched else None
