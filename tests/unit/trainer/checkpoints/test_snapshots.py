"""Snapshots: whole or absent, and never silently wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tinsmith_trainer.checkpoints.snapshots import Snapshot, SnapshotFile, SnapshotFolder
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.errors import Failure, ServerError

STATE = AdapterState(
    LoraSpec(rank=2, alpha=32.0, seed=7, train_mlp=False),
    optimizer_step=3,
    tensors={
        "weights/m.lora_A": np.arange(6, dtype=np.float32).reshape(2, 3),
        "gradients/m.lora_A": np.zeros((2, 3), np.float32),
    },
)


def snapshot(applied: int = 5, failure: Failure | None = None) -> Snapshot:
    return Snapshot("sess:train:0", applied, STATE, failure)


@pytest.mark.parametrize("failure", [None, Failure("user", "forward_backward 4 failed")], ids=["whole", "failed"])
def test_a_written_snapshot_is_read_bit_for_bit(tmp_path: Path, failure: Failure | None) -> None:
    folder = SnapshotFolder(tmp_path)
    read = folder.read(folder.write(snapshot(failure=failure)))
    assert (read.model_id, read.applied, read.window_failure) == ("sess:train:0", 5, failure)
    assert (read.state.lora, read.state.optimizer_step) == (STATE.lora, 3)
    assert {name: tensor.tobytes() for name, tensor in read.state.tensors.items()} == {
        name: tensor.tobytes() for name, tensor in STATE.tensors.items()
    }


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: content[:-1] + b"\x01"], ids=["truncated", "altered"]
)
def test_a_damaged_snapshot_is_refused(tmp_path: Path, damage: object) -> None:
    folder = SnapshotFolder(tmp_path)
    file = folder.write(snapshot())
    path = tmp_path / file.name
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ServerError, match="damaged"):
        folder.read(file)


def test_a_missing_snapshot_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"gone\.safetensors"):
        SnapshotFolder(tmp_path).read(SnapshotFile("gone.safetensors", "0"))


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path)
    kept = folder.write(snapshot(applied=5))
    folder.write(snapshot(applied=6))
    (tmp_path / ".half.safetensors.tmp").write_bytes(b"half")
    (tmp_path / "lost+found").mkdir()
    folder.keep_only([kept.name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lost+found", kept.name]
