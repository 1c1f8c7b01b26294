"""The effect on the engine and the result, for each kind of operation.

An executor does not write to the journal. The operation runner makes results durable.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import orjson
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.checkpoints.checkpoint_root import (
    CheckpointRoot,
    Contents,
    LoadedCheckpoint,
    SavedWeights,
    WrittenCheckpoint,
)
from tinsmith_trainer.checkpoints.shared_saves import SharedSaves
from tinsmith_trainer.disk.durable_files import sha256_of
from tinsmith_trainer.engines.base import (
    AdamParams,
    AdapterState,
    AnnouncedAdapter,
    Engine,
    LoraSpec,
)
from tinsmith_trainer.engines.imports.size_limits import SizeLimits
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.oplog.journal_tables import Operation, OperationResult, StepFigures
from tinsmith_trainer.process.failpoints import reach
from tinsmith_trainer.training.loading import check_rank, check_same_shape

PATH_KINDS = {
    worker_pb2.TRAINING: "weights",
    worker_pb2.SAMPLER: "sampler_weights",
    worker_pb2.EXTERNAL: "external_weights",
}
EPHEMERAL_AREA = "ephemeral"
AREAS = (*PATH_KINDS.values(), EPHEMERAL_AREA)
"""The folders of the checkpoint root that workers write to."""
IMPORT_DIGITS = 15
"""The number of hexadecimal digits that an ID takes from a digest.

An ID of this length is practically unique, and has at most 64 bits.
"""
SAMPLED_KINDS = (worker_pb2.SAMPLER, worker_pb2.EPHEMERAL)


@dataclass(frozen=True, slots=True)
class CopiedSave:
    """The data for writing a checkpoint. The copied data does not depend on the engine any more."""

    operation: Operation
    request: worker_pb2.SaveWeights
    state: AdapterState
    epoch: int
    releases: str | None = None  # the reason of the release, if the model is saved before it is released


class Executor:
    """The execution of operations on one engine. An operation that raises TrainerError leaves the adapter unchanged.

    A save copies the adapter, and any thread may write the copy. Any thread may read the checkpoint of a load. All
    other operations are executed immediately. Training calls are in `TrainingCalls`.
    """

    def __init__(self, engine: Engine, checkpoints: CheckpointRoot, shared: SharedSaves | None = None) -> None:
        """Create an executor. `shared` keeps saves in memory for the process of a sampler on this machine."""
        self._engine = engine
        self._checkpoints = checkpoints
        self._shared = shared
        self._base = engine.base_model()

    def execute(self, operation: Operation, payload: bytes) -> OperationResult:
        """Run an operation that is not a training call, a save or a load."""
        model_id = operation.model_id
        match operation.kind:
            case worker_pb2.CREATE_MODEL:
                return self._create(model_id, worker_pb2.CreateModel.FromString(payload))
            case worker_pb2.OPTIM_STEP:
                return self._optim_step(model_id, worker_pb2.OptimStep.FromString(payload))
            case worker_pb2.RELEASE_MODEL:
                reason = worker_pb2.ReleaseModel.FromString(payload).reason
                return OperationResult(orjson.dumps({}), events=(_released(model_id, reason),), releases=reason)
        raise UserError(f"Operation kind {operation.kind} is not known to this worker.")

    def copy(self, operation: Operation, request: worker_pb2.SaveWeights, epoch: int, latest_save: int) -> CopiedSave:
        """Copy the adapter for a save, or for a release that saves first.

        `latest_save` is the event of this model's latest save with the requested name, or 0 if no save has this name.
        """
        if operation.kind == worker_pb2.SAVE_WEIGHTS:
            _check_name_is_free(operation.model_id, request, latest_save)
        copied = self._engine.state if request.kind == worker_pb2.TRAINING else self._engine.weights
        return CopiedSave(operation, request, copied(operation.model_id), epoch)

    def write(self, save: CopiedSave) -> OperationResult:
        """Write a copied save. The checkpoint is durable on return. Thread-safe."""
        operation, request, state = save.operation, save.request, save.state
        is_sampled = request.kind in SAMPLED_KINDS and save.releases is None
        written = self._write_shared(save) if is_sampled else self._write(save)
        reach("checkpoint-before-commit")
        saved = _saved_event(operation, request, written, state.lora)
        return OperationResult(
            orjson.dumps(_save_result(operation.model_id, request, written)),
            events=(saved,) if save.releases is None else (saved, _released(operation.model_id, save.releases)),
            saved_name=(request.kind, request.name) if request.name else None,
            saved=SavedWeights(written, state.weights_only()) if is_sampled else None,
            releases=save.releases,
        )

    def _write_shared(self, save: CopiedSave) -> WrittenCheckpoint:
        with ExitStack() as sharing:
            finish_sharing = None
            if self._shared is not None:
                finish_sharing = sharing.enter_context(self._shared.copying(save.state, self._base.revision))
            written = self._write(save)
            if finish_sharing is not None:
                finish_sharing(written.manifest_digest)
            return written

    def _write(self, save: CopiedSave) -> WrittenCheckpoint:
        request = save.request
        contents: Contents = "training" if request.kind == worker_pb2.TRAINING else "sampler"
        return self._checkpoints.write(
            save.operation.model_id,
            save.operation.seq_id,
            save.epoch,
            contents,
            save.state,
            self._base,
            EPHEMERAL_AREA if request.kind == worker_pb2.EPHEMERAL else PATH_KINDS[request.kind],
            age_recipients=request.age_recipients,
            may_use_reserve=save.operation.kind == worker_pb2.RELEASE_MODEL,
        )

    def import_adapter(self, request: worker_pb2.ImportAdapterRequest) -> worker_pb2.ImportAdapterReply:
        """Make a checkpoint from uploaded files, which are not trusted. Thread-safe; no adapter changes.

        The directory is named after a digest of the files, so different files make different checkpoints.
        """
        lora = request.lora
        check_rank("The upload", lora.rank, self._engine.capabilities().max_rank)
        announced = AnnouncedAdapter(lora.rank, lora.seed, lora.train_attn, lora.train_mlp, lora.train_unembed)
        limits = SizeLimits.of(announced, self._engine.adapter_shapes, self._engine.embedding_shapes())
        config, weights = self._checkpoints.read_upload(
            request.directory, most_config_bytes=limits.config_bytes, most_weights_bytes=limits.weights_bytes
        )
        state = self._engine.read_adapter(config, weights, announced)
        number = int(sha256_of(config, weights)[:IMPORT_DIGITS], 16)
        area = PATH_KINDS[worker_pb2.EXTERNAL]
        written = self._checkpoints.write(request.model_id, 0, number, "sampler", state, self._base, area)
        return worker_pb2.ImportAdapterReply(
            directory=written.directory,
            manifest_digest=written.manifest_digest,
            size_bytes=written.size_bytes,
            lora=_lora_message(state.lora),
        )

    def _create(self, model_id: str, request: worker_pb2.CreateModel) -> OperationResult:
        lora = _lora_spec(request.lora)
        self._engine.create_adapter(model_id, lora)
        event = worker_pb2.Event(model_created=worker_pb2.ModelCreated(model_id=model_id, lora=request.lora))
        return OperationResult(
            orjson.dumps({"model_id": model_id, "type": "create_model"}), forces_snapshot=True, events=(event,)
        )

    def read(self, request: worker_pb2.LoadWeights) -> LoadedCheckpoint:
        """Return the checkpoint for a load. Thread-safe. Raises TrainerError."""
        return self._checkpoints.read(request.directory, request.manifest_digest, self._base)

    def load(self, model_id: str, request: worker_pb2.LoadWeights, loaded: LoadedCheckpoint) -> OperationResult:
        if request.with_optimizer and not loaded.has_optimizer:
            raise UserError(f"{request.tinker_path} holds no optimizer state; load it without the optimizer.")
        replaced = None if request.create else self._engine.state(model_id)
        if replaced is None:
            check_rank(request.tinker_path, loaded.state.lora.rank, self._engine.capabilities().max_rank)
        else:
            check_same_shape(request.tinker_path, replaced.lora, loaded.state.lora)
        self._engine.load_state(model_id, loaded.state, request.with_optimizer)
        result = {"path": request.tinker_path, "model_id": model_id, "type": "load_weights"}
        events: tuple[worker_pb2.Event, ...] = ()
        if request.create:
            created = worker_pb2.ModelCreated(model_id=model_id, lora=_lora_message(loaded.state.lora))
            events = (worker_pb2.Event(model_created=created),)
        return OperationResult(orjson.dumps(result), forces_snapshot=True, replaced=replaced, events=events)

    def _optim_step(self, model_id: str, request: worker_pb2.OptimStep) -> OperationResult:
        params = AdamParams(
            learning_rate=request.learning_rate,
            beta1=request.beta1,
            beta2=request.beta2,
            eps=request.eps,
            weight_decay=request.weight_decay,
            grad_clip_norm=request.grad_clip_norm,
        )
        measured = self._engine.optim_step(model_id, params)
        metrics = _json_floats(measured)
        # Programs for tinker-cloud read the norm here.
        step = StepFigures(int(measured["step"]), request.learning_rate, measured["grad_norm"])
        return OperationResult(orjson.dumps({"metrics": metrics, "grad_norm": metrics["grad_norm"]}), step=step)


def save_request(operation: Operation, payload: bytes) -> worker_pb2.SaveWeights | None:
    """Return the save that the operation requests, or None if the operation requests no save."""
    if operation.kind == worker_pb2.SAVE_WEIGHTS:
        return worker_pb2.SaveWeights.FromString(payload)
    if operation.kind != worker_pb2.RELEASE_MODEL:
        return None
    release = worker_pb2.ReleaseModel.FromString(payload)
    return release.final_checkpoint if release.HasField("final_checkpoint") else None


def release_reason(operation: Operation, payload: bytes) -> str | None:
    """Return the message for operations after a release. The message is empty if a session ended.

    Return None for an operation that is not a release.
    """
    is_release = operation.kind == worker_pb2.RELEASE_MODEL
    return worker_pb2.ReleaseModel.FromString(payload).reason if is_release else None


def _released(model_id: str, reason: str) -> worker_pb2.Event:
    return worker_pb2.Event(model_released=worker_pb2.ModelReleased(model_id=model_id, reason=reason))


def _check_name_is_free(model_id: str, request: worker_pb2.SaveWeights, latest_save: int) -> None:
    """Refuse a name that another save already uses.

    The server knows the saves up to `seen_event_id`. Later saves of this model are in this worker's journal.
    """
    if not request.name or request.overwrite:
        return
    if request.name_taken or latest_save > request.seen_event_id:
        path = f"tinker://{model_id}/{PATH_KINDS[request.kind]}/{request.name}"
        raise UserError(f"{path} exists already. {_remedy_for_taken_name(request)}")


def _remedy_for_taken_name(request: worker_pb2.SaveWeights) -> str:
    """Return what a user can do if a name is taken, which depends on the kind of save.

    The SDK's save_weights_for_sampler has no `overwrite`.
    """
    if request.kind == worker_pb2.TRAINING:
        return "Choose another name, delete it first, or save with overwrite=True."
    return "Choose another name, or delete it first."


def _lora_spec(message: worker_pb2.LoraConfig) -> LoraSpec:
    return LoraSpec(
        rank=message.rank,
        alpha=message.alpha,
        seed=message.seed,
        train_attn=message.train_attn,
        train_mlp=message.train_mlp,
        train_unembed=message.train_unembed,
    )


def _lora_message(lora: LoraSpec) -> worker_pb2.LoraConfig:
    return worker_pb2.LoraConfig(
        rank=lora.rank,
        alpha=lora.alpha,
        seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


def _save_result(model_id: str, request: worker_pb2.SaveWeights, written: WrittenCheckpoint) -> dict[str, object]:
    if request.kind == worker_pb2.EPHEMERAL:
        return {"sampling_session_id": request.sampling_session_id, "type": "save_weights_for_sampler"}
    path = f"tinker://{model_id}/{PATH_KINDS[request.kind]}/{request.name}"
    match request.kind:
        case worker_pb2.EXTERNAL:
            return {"path": path, "size_bytes": written.size_bytes, "type": "save_weights_external"}
        case worker_pb2.SAMPLER:
            return {"path": path, "type": "save_weights_for_sampler"}
    return {"path": path, "type": "save_weights"}


def _saved_event(
    operation: Operation, request: worker_pb2.SaveWeights, written: WrittenCheckpoint, lora: LoraSpec
) -> worker_pb2.Event:
    saved = worker_pb2.CheckpointSaved(
        model_id=operation.model_id,
        seq_id=operation.seq_id,
        kind=request.kind,
        name=request.name,
        directory=written.directory,
        manifest_digest=written.manifest_digest,
        size_bytes=written.size_bytes,
        user_metadata=request.user_metadata,
        has_user_metadata=request.has_user_metadata,
        overwrite=request.overwrite,
        sampling_session_id=request.sampling_session_id,
        lora=_lora_message(lora),
    )
    if request.HasField("ttl_seconds"):
        saved.ttl_seconds = request.ttl_seconds
    return worker_pb2.Event(checkpoint_saved=saved)


def _json_floats(metrics: Mapping[str, float]) -> dict[str, object]:
    # The SDK parses with orjson, which has no NaN or Infinity, but reads these strings as floats.
    return {name: value if np.isfinite(value) else str(value) for name, value in metrics.items()}
