"""`CheckpointManager`, which saves a run in the background and resumes the run from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import tinker
import yaml

from tinsmith.training.checkpoints.background import BackgroundSaves
from tinsmith.training.checkpoints.metadata import (
    ADAPTER_FILE,
    CONFIG_FILE,
    OPTIMIZER_FILE,
    TOKENIZER_FILE,
    TRAINER_STATE_FILE,
    Metadata,
    directory_name,
)
from tinsmith.training.checkpoints.retention import Retention
from tinsmith.training.checkpoints.server_states import OPTIMIZER_IN_ARCHIVE, ServerStates, StartedSave, start_save
from tinsmith.training.checkpoints.store import CheckpointStore, Damage
from tinsmith.training.checkpoints.trainer_state import (
    TrainerState,
    frozen_copy,
    read_trainer_state,
    write_optimizer,
    write_trainer_state,
)
from tinsmith.training.errors import CheckpointDamaged, CheckpointError, NotOffered, SaveFailed

logger = logging.getLogger(__name__)

UNFINISHED = "the save of step {step} was not finished and is discarded"


class FastTokenizer(Protocol):
    """A tokenizer of transformers, or any object that contains a `tokenizers.Tokenizer`."""

    @property
    def backend_tokenizer(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run that was resumed after `step`.

    `skipped` lists newer checkpoints that are damaged, each with a reason.
    """

    step: int
    training_client: tinker.TrainingClient
    loop_state: Mapping[str, Any]
    metrics: Mapping[str, float]
    skipped: tuple[Damage, ...]


@dataclass(frozen=True, slots=True)
class _Save:
    """The content of a save at the time of the request."""

    step: int
    started: StartedSave
    training_client: tinker.TrainingClient
    loop_state: dict[str, Any]
    metrics: dict[str, float]


class CheckpointManager:
    """A manager of the checkpoints of a run. Each step has a directory below `root`, a path or fsspec URL.

    docs/how-to/training.md lists the files of a checkpoint.

    - `config`: the settings that are written to `config.yaml`.
    - `save_every`: the number of steps between saves of `maybe_save`; with 0, `maybe_save` never saves.
    - `adapter`: if False, the adapter's weights stay on the server.
    - `optimizer`: if True, the moments of the optimizer are downloaded if the server offers the moments.
    - `tokenizer`: None uses the training client's tokenizer; False writes no file.
    - `ttl_seconds`: the lifetime of the states on the server, at least an hour; None keeps a state as long as the
      checkpoint's directory.
    - `delete_states`: if True, the server's state is deleted when `retention` removes the checkpoint's directory.
    - `user_metadata`: the metadata of the training run that `resume` creates.

    At any time, only one manager may write below a root. Used as a context, the manager waits for the last save at the
    end, and raises the failure of this save. After a KeyboardInterrupt, the manager does not wait, and discards the
    save in progress.
    """

    def __init__(
        self,
        root: str | Path,
        service: tinker.ServiceClient,
        *,
        config: Mapping[str, Any],
        save_every: int = 0,
        retention: Retention | None = None,
        adapter: bool = True,
        optimizer: bool = False,
        tokenizer: FastTokenizer | Literal[False] | None = None,
        ttl_seconds: int | None = None,
        delete_states: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._store = CheckpointStore(str(root), **(storage_options or {}))
        self._service = service
        self._server = ServerStates.of(service)
        self._config = yaml.safe_dump(dict(config), sort_keys=False)
        self._save_every = save_every
        self._retention = retention or Retention()
        self._adapter = adapter
        self._optimizer = optimizer
        self._tokenizer = tokenizer
        self._ttl_seconds = ttl_seconds
        self._delete_states = delete_states
        self._user_metadata = None if user_metadata is None else dict(user_metadata)
        self._saves = BackgroundSaves()
        self._swept = False
        self._went_back_to: int | None = None

    @property
    def store(self) -> CheckpointStore:
        """Return the store. The store can list, read and verify checkpoints."""
        return self._store

    def maybe_save(
        self,
        training_client: tinker.TrainingClient,
        step: int,
        *,
        loop_state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Save if `save_every` divides `step`. Return whether `save_every` divides `step`.

        Raises the errors of `save`, at every step.
        """
        if self._save_every < 1 or step < 1 or step % self._save_every:
            self._saves.raise_failure()
            return False
        self.save(training_client, step, loop_state=loop_state, metrics=metrics)
        return True

    def save(
        self,
        training_client: tinker.TrainingClient,
        step: int,
        *,
        loop_state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Save the state after all calls so far as the checkpoint of `step`. The loop continues during the save.

        `loop_state` is the position of the loop, for example `{"epoch": 1, "batch": 30}`. The state is copied before
        `save` returns. If another save is in progress, wait until that save is complete. Raises SaveFailed for the
        earlier save, CheckpointExists, and UnfitLoopState.
        """
        self._saves.wait()
        if self._saves.is_abandoned:
            raise CheckpointError("this manager was interrupted; create another one to resume")
        if self._went_back_to is None or step <= self._went_back_to:
            self._store.require_free(step)
        copied = frozen_copy(loop_state)
        scores = {name: float(value) for name, value in (metrics or {}).items()}
        started = start_save(
            training_client, directory_name(step), adapter=self._adapter, ttl_seconds=self._ttl_seconds
        )
        self._saves.start(step, partial(self._write, _Save(step, started, training_client, copied, scores)))

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add measurements that were made later, such as evaluation scores, to the metrics of a checkpoint.

        At the next save, `retention` takes the new measurements into account. If a save is in progress, wait until the
        save is complete. Raises SaveFailed for the save in progress, NoCheckpoint if `retention` has removed the
        checkpoint, and CheckpointDamaged.
        """
        self._saves.wait()
        self._store.add_metrics(step, metrics)

    def resume(self, step: int | None = None) -> Resumed | None:
        """Resume from the newest complete checkpoint, or from the checkpoint of `step`.

        Return None if no checkpoint exists.

        After a resume from `step`, the next save removes the checkpoints that are newer than `step`. Raises StateGone,
        and if `step` is given, also NoCheckpoint and CheckpointDamaged.
        """
        self._saves.wait()
        metadata, damaged = self._store.newest_whole() if step is None else (self._store.verify(step), [])
        for damage in damaged:
            logger.warning("the checkpoint of step %d is skipped: %s", damage.step, damage.reason)
        if metadata is None:
            return None
        with self._store.open(metadata.step, TRAINER_STATE_FILE) as stream:
            state = read_trainer_state(stream.read())
        self._server.require(state.state_path)
        self._went_back_to = step
        client = self._service.create_training_client_from_state_with_optimizer(
            state.state_path, user_metadata=self._user_metadata
        ).result()
        return Resumed(metadata.step, client, state.loop_state, metadata.metrics, tuple(damaged))

    def wait(self) -> None:
        """Wait until the save that is in progress is complete. Raises SaveFailed."""
        self._saves.wait()

    def close(self) -> None:
        """Wait until the save that is in progress is complete, and end the manager's thread.

        `close` must be the last call.
        """
        self._saves.close()

    def abandon(self) -> int | None:
        """Discard the save that is in progress, without waiting.

        Return the step of the discarded save, or None if no save was in progress.

        In an interrupted program, `abandon` must be the last call. Callers that wait for the save get SaveFailed.
        """
        return self._saves.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            if (step := self.abandon()) is not None:
                error.add_note(UNFINISHED.format(step=step))
            return
        try:
            self.close()
        except SaveFailed as failure:
            if error is None:
                raise
            # The error of the loop is more important.
            error.add_note(str(failure))

    def _write(self, save: _Save) -> None:
        """Write the checkpoint, in the background thread."""
        self._sweep()
        state_path = save.started.state.result().path
        try:
            self._retire_newer()
            if save.step in self._store.steps():  # a damaged checkpoint, because `save` refuses a complete one
                self._discard(directory_name(save.step))
            self._store.write(save.step, partial(self._fill, save, state_path))
        except BaseException:
            # No directory refers to the state.
            self._server.delete(state_path)
            raise
        self._rotate(save.step)

    def _fill(self, save: _Save, state_path: str, folder: Path) -> Metadata:
        write_trainer_state(folder / TRAINER_STATE_FILE, TrainerState(save.step, state_path, save.loop_state))
        (folder / CONFIG_FILE).write_text(self._config)
        adapter_config = None
        if save.started.adapter is not None:
            adapter_config = self._server.fetch_adapter(save.started.adapter.result().path, folder / ADAPTER_FILE)
        if self._optimizer:
            moments = folder / OPTIMIZER_IN_ARCHIVE
            self._server.fetch_optimizer(state_path, moments)
            write_optimizer(moments, folder / OPTIMIZER_FILE)
            moments.unlink()
        if self._tokenizer is not False:
            (folder / TOKENIZER_FILE).write_text(
                _tokenizer_json(self._tokenizer or save.training_client.get_tokenizer())
            )
        if self._saves.is_abandoned:
            # In a notebook the process may have resumed from the previous checkpoint by now.
            raise CheckpointError(UNFINISHED.format(step=save.step))
        return Metadata(
            step=save.step,
            created_at=datetime.now(UTC),
            base_model=save.training_client.get_info().model_data.model_name or "",
            state_path=state_path,
            metrics=save.metrics,
            adapter_config=adapter_config,
            files={},
        )

    def _retire_newer(self) -> None:
        """Remove the checkpoints that are newer than the checkpoint from which the run was resumed, newest first.

        Because the newest checkpoint is removed first, the remaining steps are a consistent sequence even after a kill.
        Call this only after the server has the new state, so that no checkpoint is lost if the server cannot be
        reached.
        """
        if self._went_back_to is None:
            return
        for step in reversed(self._store.steps()):
            if step <= self._went_back_to:
                break
            try:
                self._store.remove(step, partial(self._delete_state, self._store.metadata(step).state_path))
            except CheckpointDamaged:
                self._discard(directory_name(step))
        self._went_back_to = None

    def _rotate(self, step: int) -> None:
        try:
            for metadata in self._store.removable(self._retention):
                self._store.remove(metadata.step, partial(self._delete_state, metadata.state_path))
        except Exception as error:
            raise CheckpointError(f"step {step} was saved, and an older one was not removed: {error}") from error

    def _sweep(self) -> None:
        """Remove the incomplete writes and removals of a killed run, once."""
        if self._swept:
            return
        for name in self._store.leftovers():
            self._discard(name)
        self._swept = True

    def _discard(self, name: str) -> None:
        """Remove an incomplete directory, and the state on the server that the directory names."""
        content = self._store.read_leftover(name, TRAINER_STATE_FILE)
        if content is not None and (state_path := _state_path_in(content)) is not None:
            self._delete_state(state_path)
        self._store.remove_leftover(name)

    def _delete_state(self, state_path: str) -> None:
        if self._delete_states:
            self._server.delete(state_path)


def _state_path_in(trainer_state: bytes) -> str | None:
    """Return the path of the state on the server, or None if the file is incomplete."""
    try:
        return read_trainer_state(trainer_state).state_path
    except CheckpointDamaged:
        return None


def has_tokenizer_json(tokenizer: Any) -> bool:
    """Return whether the tokenizer can write a tokenizer.json.

    The slow tokenizers of transformers cannot write this file.
    """
    return getattr(tokenizer, "backend_tokenizer", None) is not None


def _tokenizer_json(tokenizer: Any) -> str:
    if not has_tokenizer_json(tokenizer):
        raise NotOffered(f"{type(tokenizer).__name__} has no tokenizer.json: pass a fast tokenizer, or tokenizer=False")
    return str(tokenizer.backend_tokenizer.to_str())
