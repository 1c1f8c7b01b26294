"""Saves a run every so many steps without holding it up, and lets it go on where it was."""

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

UNFINISHED = "the save of step {step} was under way, and is no checkpoint"


class FastTokenizer(Protocol):
    """Of transformers, or whatever else has a `tokenizers.Tokenizer` inside."""

    @property
    def backend_tokenizer(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run at the end of `step`. `skipped` are newer checkpoints that are damaged, and why."""

    step: int
    training_client: tinker.TrainingClient
    loop_state: Mapping[str, Any]
    metrics: Mapping[str, float]
    skipped: tuple[Damage, ...]


@dataclass(frozen=True, slots=True)
class _Save:
    """All that a save is made of, as it was when it was asked for."""

    step: int
    started: StartedSave
    training_client: tinker.TrainingClient
    loop_state: dict[str, Any]
    metrics: dict[str, float]


class CheckpointManager:
    """One directory per step below `root`, a path or any URL of fsspec; see docs/how-to/training.md for what is in it.

    `save_every` counts steps, for `maybe_save`; 0 never saves there. `config` goes to `config.yaml` as it is.
    `adapter=False` leaves the weights to the server. `optimizer=True` fetches the optimizer's moments as well, from a
    server that gives them. `tokenizer` is the training client's own if None, and no file if False.
    `ttl_seconds` ends the states at the server, from one hour on; None keeps them as long as their directory.
    `delete_states` deletes a directory's state at the server when `retention` removes the directory.
    `user_metadata` is that of the training run that `resume` makes.

    One manager at a time writes below a root. As a context it waits for the last save, and raises what became of it;
    a KeyboardInterrupt does not wait, and the save that is under way is no checkpoint then.
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
        """To list, read and verify what is there."""
        return self._store

    def maybe_save(
        self,
        training_client: tinker.TrainingClient,
        step: int,
        *,
        loop_state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Saves if `save_every` divides `step`; whether it does. Raises what `save` raises, at any step."""
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
        """What the calls made so far come to, as the checkpoint of `step`; written while the loop goes on.

        `loop_state` says where the loop is, for example `{"epoch": 1, "batch": 30}`; it is copied. Waits for a save
        that is still under way. Raises SaveFailed for that one, CheckpointExists, and UnfitLoopState.
        """
        self._saves.wait()
        if self._saves.is_abandoned:
            raise CheckpointError("this manager was interrupted: resume with another one")
        if self._went_back_to is None or step <= self._went_back_to:
            self._store.require_free(step)
        copied = frozen_copy(loop_state)
        scores = {name: float(value) for name, value in (metrics or {}).items()}
        started = start_save(
            training_client, directory_name(step), adapter=self._adapter, ttl_seconds=self._ttl_seconds
        )
        self._saves.start(step, partial(self._write, _Save(step, started, training_client, copied, scores)))

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """What was measured after a save, such as an evaluator's scores, among the metrics of the checkpoint of `step`.

        The next save's `retention` counts them. Waits for a save that is under way. Raises SaveFailed for that one,
        NoCheckpoint where `retention` has removed it meanwhile, and CheckpointDamaged.
        """
        self._saves.wait()
        self._store.add_metrics(step, metrics)

    def resume(self, step: int | None = None) -> Resumed | None:
        """The newest whole checkpoint with a training client that goes on from it, or that of `step`; None without any.

        From `step` the run goes another way than before: the next save removes the newer checkpoints, as `retention`
        removes one. Raises NoCheckpoint and CheckpointDamaged for a `step` of yours, and StateGone.
        """
        self._saves.wait()
        metadata, damaged = self._store.newest_whole() if step is None else (self._store.verify(step), [])
        for damage in damaged:
            logger.warning("checkpoint of step %d is passed over: %s", damage.step, damage.reason)
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
        """Returns when the save under way is a whole checkpoint. Raises SaveFailed."""
        self._saves.wait()

    def close(self) -> None:
        """As `wait`, and the last call."""
        self._saves.close()

    def abandon(self) -> int | None:
        """The last call of a program that is interrupted: waits for nothing.

        The save that is under way is no checkpoint then, and whoever waits for it is told so by SaveFailed. Returns
        its step; None without one.
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
            # What ended the loop is what its writer must see.
            error.add_note(str(failure))

    def _write(self, save: _Save) -> None:
        """In the thread."""
        self._sweep()
        state_path = save.started.state.result().path
        try:
            self._retire_newer()
            if save.step in self._store.steps():  # damaged: a whole one was refused
                self._discard(directory_name(save.step))
            self._store.write(save.step, partial(self._fill, save, state_path))
        except BaseException:
            # No directory refers to it.
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
            # In a notebook the process goes on, and may have gone on from the checkpoint before this one.
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
        """Of the way that the run took before it went back. The newest first: what a kill leaves are steps of one way.

        When the server has the new state, so that one that is away costs nothing.
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
        """What a run that was killed left behind, once: a cut-off write, or a removal without its end."""
        if self._swept:
            return
        for name in self._store.leftovers():
            self._discard(name)
        self._swept = True

    def _discard(self, name: str) -> None:
        """A directory that is no whole checkpoint, and the state that it names."""
        content = self._store.read_leftover(name, TRAINER_STATE_FILE)
        if content is not None and (state_path := _state_path_in(content)) is not None:
            self._delete_state(state_path)
        self._store.remove_leftover(name)

    def _delete_state(self, state_path: str) -> None:
        if self._delete_states:
            self._server.delete(state_path)


def _state_path_in(trainer_state: bytes) -> str | None:
    """None where the file was cut off."""
    try:
        return read_trainer_state(trainer_state).state_path
    except CheckpointDamaged:
        return None


def has_tokenizer_json(tokenizer: Any) -> bool:
    """A slow one of transformers has none."""
    return getattr(tokenizer, "backend_tokenizer", None) is not None


def _tokenizer_json(tokenizer: Any) -> str:
    if not has_tokenizer_json(tokenizer):
        raise NotOffered(
            f"{type(tokenizer).__name__} has no tokenizer.json: give the manager a fast tokenizer, or tokenizer=False"
        )
    return str(tokenizer.backend_tokenizer.to_str())
