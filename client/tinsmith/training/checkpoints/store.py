"""The checkpoints of one run.

This module lists, reads, verifies, writes and removes checkpoints. No function of this module needs a server.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from tinsmith.training.checkpoints.metadata import (
    ADAPTER_FILE,
    METADATA_FILE,
    TOKENIZER_FILE,
    Metadata,
    digest_of,
    digest_of_file,
    directory_name,
    from_json,
    step_of,
    to_json,
)
from tinsmith.training.checkpoints.retention import Retention
from tinsmith.training.checkpoints.storage import Storage, open_storage
from tinsmith.training.errors import CheckpointDamaged, CheckpointError, CheckpointExists, NoCheckpoint

Fill = Callable[[Path], Metadata]
"""A function that writes the files of a checkpoint to a folder.

The function returns the metadata of the checkpoint, without `files`.
"""


@dataclass(frozen=True, slots=True)
class Damage:
    """The step of a damaged checkpoint, and a sentence about the damage."""

    step: int
    reason: str


class CheckpointStore:
    """The checkpoints at a path or fsspec URL.

    Several processes may read the checkpoints, but only one process may write.
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        self._storage: Storage = open_storage(url, **storage_options)
        # In an object store, metrics written during a removal would turn the remains into a checkpoint.
        self._one_at_a_time = Lock()

    @property
    def url(self) -> str:
        return self._storage.url

    def address(self, step: int) -> str:
        """Return the address of the step's directory, for messages."""
        return f"{self.url.rstrip('/')}/{directory_name(step)}"

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints in ascending order. Damaged checkpoints are included."""
        steps = {name: step_of(name) for name in self._storage.names()}
        whole = (
            step for name, step in steps.items() if step is not None and METADATA_FILE in self._storage.files(name)
        )
        return sorted(whole)

    def metadata(self, step: int) -> Metadata:
        """Return the metadata. Raises NoCheckpoint and CheckpointDamaged."""
        try:
            with self._storage.open(directory_name(step), METADATA_FILE) as stream:
                metadata = from_json(stream.read())
        except FileNotFoundError:
            raise NoCheckpoint(f"there is no checkpoint of step {step} in {self.url}") from None
        if metadata.step != step:
            raise CheckpointDamaged(f"{self.address(step)} contains the checkpoint of step {metadata.step}")
        return metadata

    def open(self, step: int, file: str) -> BinaryIO:
        """Open a file. Raises NoCheckpoint if the checkpoint does not contain this file."""
        try:
            return self._storage.open(directory_name(step), file)
        except FileNotFoundError:
            raise NoCheckpoint(f"{self.address(step)} has no {file}") from None

    def verify(self, step: int) -> Metadata:
        """Read all files of a checkpoint, and compare the digests.

        Raises NoCheckpoint, and CheckpointDamaged with a reason.
        """
        metadata = self.metadata(step)
        for name, expected in metadata.files.items():
            try:
                with self._storage.open(directory_name(step), name) as stream:
                    found = digest_of(stream)
            except FileNotFoundError:
                raise CheckpointDamaged(f"{self.address(step)} lacks {name}") from None
            if found.size_bytes != expected.size_bytes:
                sizes = f"{found.size_bytes} bytes long, but {expected.size_bytes} were written"
                raise CheckpointDamaged(f"{self.address(step)}/{name} is {sizes}")
            if found != expected:
                raise CheckpointDamaged(f"{self.address(step)}/{name} differs from what was written")
        return metadata

    def newest_whole(self) -> tuple[Metadata | None, list[Damage]]:
        """Return the newest undamaged checkpoint, and all damaged checkpoints that are newer."""
        damaged: list[Damage] = []
        for step in reversed(self.steps()):
            try:
                return self.verify(step), damaged
            except CheckpointDamaged as error:
                damaged.append(Damage(step, str(error)))
        return None, damaged

    def readable(self) -> list[Metadata]:
        """Return the checkpoints with readable metadata, in ascending order.

        Only the metadata is read, not the other files of a checkpoint.
        """
        readable = []
        for step in self.steps():
            try:
                readable.append(self.metadata(step))
            except CheckpointDamaged:
                continue
        return readable

    def require_free(self, step: int) -> None:
        """Raise CheckpointExists if the step has a checkpoint that is not damaged.

        A damaged checkpoint may be replaced.
        """
        try:
            self.verify(step)
        except (NoCheckpoint, CheckpointDamaged):
            return
        raise CheckpointExists(f"{self.address(step)} exists already: prune it, or use another directory for this run")

    def write(self, step: int, fill: Fill) -> Metadata:
        """Write a checkpoint, either completely or not at all. An interruption does not affect other checkpoints.

        Raises CheckpointExists, and the errors of `fill`.
        """
        self.require_free(step)
        with self._storage.staging(step) as folder:
            described = fill(folder)
            files = {path.name: digest_of_file(path) for path in sorted(folder.iterdir())}
            metadata = replace(described, files=files)
            (folder / METADATA_FILE).write_bytes(to_json(metadata))
            self._storage.remove(directory_name(step))
            self._storage.publish(folder, step)
        return metadata

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> Metadata:
        """Add metrics to a checkpoint, either all metrics or none.

        A metric replaces an earlier metric of the same name.

        Raises NoCheckpoint and CheckpointDamaged.
        """
        with self._one_at_a_time:
            before = self.metadata(step)
            scores = {name: float(value) for name, value in metrics.items()}
            metadata = replace(before, metrics={**before.metrics, **scores})
            self._storage.replace(directory_name(step), METADATA_FILE, to_json(metadata))
        return metadata

    def remove(self, step: int, then: Callable[[], None] = lambda: None) -> None:
        """Remove a checkpoint.

        First, the checkpoint becomes incomplete; next, `then` is called; last, the files are removed. If the removal
        fails, `leftovers` finds the remaining files.
        """
        with self._one_at_a_time:
            rest = self._storage.retire(directory_name(step))
        then()
        self._storage.remove(rest)

    def removable(self, retention: Retention) -> list[Metadata]:
        """Return the checkpoints that no rule selects.

        Damaged checkpoints are never returned, so that the user can inspect them.
        """
        readable = self.readable()
        kept = retention.kept(readable)
        return [metadata for metadata in readable if metadata.step not in kept]

    def leftovers(self) -> list[str]:
        """Return the names of directories that interrupted writes and removals have left."""
        whole = {directory_name(step) for step in self.steps()}
        return [name for name in self._storage.names() if name not in whole]

    def read_leftover(self, name: str, file: str) -> bytes | None:
        """Return the content of the file, or None if the file does not exist."""
        try:
            with self._storage.open(name, file) as stream:
                return stream.read()
        except FileNotFoundError:
            return None

    def remove_leftover(self, name: str) -> None:
        self._storage.remove(name)


FILES_OF_PEFT = {ADAPTER_FILE: "adapter_model.safetensors", TOKENIZER_FILE: TOKENIZER_FILE}


class TargetTaken(CheckpointError):
    """An error for an export to a folder that already exists."""


def export_adapter(store: CheckpointStore, step: int, target: Path) -> list[str]:
    """Create the folder `target`, either completely or not at all. Return the names of the files in `target`.

    Raises NoCheckpoint for a missing checkpoint or a checkpoint without an adapter, CheckpointDamaged, and TargetTaken.
    """
    metadata = store.verify(step)
    if metadata.adapter_config is None:
        raise NoCheckpoint(f"{store.address(step)} has no adapter: the run saves with adapter=False")
    if target.exists():
        raise TargetTaken(f"{target} exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as made:
        folder = Path(made) / target.name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(metadata.adapter_config, indent=2))
        for name in FILES_OF_PEFT.keys() & metadata.files.keys():
            _copy(store, step, name, folder / FILES_OF_PEFT[name])
        folder.rename(target)
    return sorted(path.name for path in target.iterdir())


def newest_step(store: CheckpointStore) -> int:
    """Return the step of the newest undamaged checkpoint. Raises NoCheckpoint."""
    metadata, damaged = store.newest_whole()
    if metadata is None:
        raise NoCheckpoint(
            f"there is no whole checkpoint in {store.url}" + (f": {damaged[0].reason}" if damaged else "")
        )
    return metadata.step


def _copy(store: CheckpointStore, step: int, name: str, target: Path) -> None:
    with store.open(step, name) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy)
