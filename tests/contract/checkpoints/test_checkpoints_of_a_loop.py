"""The directories that a training loop keeps, in a bucket that speaks S3."""

from __future__ import annotations

import fsspec
import pytest
from support.client.checkpoints.writing import write
from tinsmith.training.checkpoints.store import CheckpointStore
from tinsmith.training.errors import CheckpointDamaged


def test_a_bucket_keeps_checkpoints_as_a_disk_does(bucket: str) -> None:
    store, reader = CheckpointStore(bucket), CheckpointStore(bucket)
    assert reader.steps() == []
    for step in (1, 2, 3):
        write(store, step, loss=1.0)
        assert reader.steps()[-1] == step, "seen at once by who has looked before"
    store.remove(1)
    assert (reader.steps(), reader.leftovers()) == ([2, 3], [])
    assert reader.verify(3).metrics == {"loss": 1.0}


def test_without_its_metadata_a_checkpoint_in_a_bucket_is_none(bucket: str) -> None:
    store = CheckpointStore(bucket)
    write(store, 1)
    write(store, 2)
    filesystem, root = fsspec.core.url_to_fs(bucket)
    filesystem.rm_file(f"{root}/step-000002/metadata.json")
    assert (store.steps(), store.leftovers()) == ([1], ["step-000002"])
    store.remove_leftover("step-000002")
    assert store.leftovers() == []
    filesystem.pipe_file(f"{root}/step-000001/config.yaml", b"lr: 0.02\n")
    with pytest.raises(CheckpointDamaged, match=r"config\.yaml differs from what was written"):
        store.verify(1)
