"""Checkpoints of small files, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from tinsmith.training.checkpoints.metadata import Metadata
from tinsmith.training.checkpoints.store import CheckpointStore

SAVED_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def state_path(step: int) -> str:
    return f"tinker://run:train:0/weights/{step}"


def described(step: int, metrics: Mapping[str, float] | None = None) -> Metadata:
    return Metadata(step, SAVED_AT, "org/tiny", state_path(step), metrics or {}, {"r": 8}, {})


def fill(step: int, metrics: Mapping[str, float], folder: Path) -> Metadata:
    (folder / "adapter.safetensors").write_bytes(bytes([step]) * 1000)
    (folder / "config.yaml").write_text("lr: 0.01\n")
    (folder / "trainer_state.pt").write_bytes(bytes([step]) * 100)
    return described(step, metrics)


def write(store: CheckpointStore, step: int, **metrics: float) -> Metadata:
    return store.write(step, partial(fill, step, metrics))
