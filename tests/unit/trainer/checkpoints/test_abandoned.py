"""Saves that never ended go after a day without a change; whatever is whole, under way or another's stays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tinsmith_trainer.checkpoints.abandoned import UNCHANGED_SECONDS, remove_abandoned
from tinsmith_trainer.checkpoints.checkpoint_root import MANIFEST_FILE

AREA = "weights"


def removed(root: Path, *, later_seconds: float) -> list[str]:
    found = remove_abandoned(root, [AREA], MANIFEST_FILE, time.time() + later_seconds)
    return sorted(str(folder.relative_to(root)) for folder in found)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder, names in {
        "weights/model/1-1": ["adapter_model.safetensors", MANIFEST_FILE],
        "weights/model/2-1": ["adapter_config.json", ".adapter_model.safetensors.tmp"],
        "weights/model/3-1": [],
        "uploads/tenant/4-1": ["adapter_model.safetensors"],
    }.items():
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            (tmp_path / folder / name).touch()
    return tmp_path


def test_a_folder_without_a_manifest_is_removed_after_a_day(root: Path) -> None:
    assert removed(root, later_seconds=UNCHANGED_SECONDS + 60) == ["weights/model/2-1", "weights/model/3-1"]
    assert sorted(str(path.relative_to(root)) for path in root.glob("*/*/*")) == [
        "uploads/tenant/4-1",
        "weights/model/1-1",
    ]


def test_a_folder_changed_within_a_day_may_be_in_use(root: Path) -> None:
    assert removed(root, later_seconds=UNCHANGED_SECONDS - 60) == []
