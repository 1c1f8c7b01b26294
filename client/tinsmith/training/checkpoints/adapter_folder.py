"""A checkpoint's adapter as PEFT, vLLM and `tinsmith import` read it: a folder of its own, without a server."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tinsmith.training.checkpoints.metadata import ADAPTER_FILE, TOKENIZER_FILE
from tinsmith.training.checkpoints.store import CheckpointStore
from tinsmith.training.errors import CheckpointError, NoCheckpoint

FILES_OF_PEFT = {ADAPTER_FILE: "adapter_model.safetensors", TOKENIZER_FILE: TOKENIZER_FILE}


class TargetTaken(CheckpointError):
    """Something is where the folder is to be made."""


def export_adapter(store: CheckpointStore, step: int, target: Path) -> list[str]:
    """Makes `target`, whole or not at all, and returns the names of its files.

    Raises NoCheckpoint where there is no checkpoint or it has no adapter, CheckpointDamaged, and TargetTaken.
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
    """Of the newest whole checkpoint. Raises NoCheckpoint."""
    metadata, damaged = store.newest_whole()
    if metadata is None:
        raise NoCheckpoint(
            f"there is no whole checkpoint in {store.url}" + (f": {damaged[0].reason}" if damaged else "")
        )
    return metadata.step


def _copy(store: CheckpointStore, step: int, name: str, target: Path) -> None:
    with store.open(step, name) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy)
