"""Checkpoints on disk and in an object store: complete or absent, with damage detected."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from support.client.checkpoints import cut_off_bucket, killed_writes
from support.client.checkpoints.cut_off_bucket import CutOffBucket, Killed
from support.client.checkpoints.writing import state_path, write
from tinsmith.training import Retention
from tinsmith.training.checkpoints.store import CheckpointStore
from tinsmith.training.errors import CheckpointDamaged, CheckpointExists, NoCheckpoint

BUCKET = f"{cut_off_bucket.PROTOCOL}://bucket/runs/a"


@pytest.fixture(params=["disk", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "runs" / "a") if request.param == "disk" else BUCKET
    CutOffBucket.empty()


@pytest.fixture
def store(url: str) -> CheckpointStore:
    return CheckpointStore(url)


def change(url: str, path: str, content: bytes | None) -> None:
    """Write a file past the store; None removes it."""
    filesystem, root = fsspec.core.url_to_fs(url)
    if content is None:
        filesystem.rm_file(f"{root}/{path}")
    else:
        filesystem.pipe_file(f"{root}/{path}", content)


def test_a_written_checkpoint_is_listed_read_and_verified(store: CheckpointStore) -> None:
    assert (store.steps(), store.newest_whole()) == ([], (None, []))
    for step in (10, 2, 1_000_000):
        write(store, step % 256, loss=float(step))
    assert store.steps() == [2, 10, 64]
    metadata = store.verify(10)
    assert (metadata.state_path, metadata.metrics) == (state_path(10), {"loss": 10.0})
    assert metadata.files.keys() == {"adapter.safetensors", "config.yaml", "trainer_state.pt"}
    with store.open(10, "adapter.safetensors") as stream:
        assert stream.read() == bytes([10]) * 1000
    assert store.leftovers() == []


def test_a_checkpoint_that_is_whole_is_never_replaced(store: CheckpointStore) -> None:
    write(store, 1)
    with pytest.raises(CheckpointExists, match="step-000001 exists already"):
        write(store, 1)


def test_a_damaged_one_may_be_written_again(store: CheckpointStore, url: str) -> None:
    write(store, 1)
    change(url, "step-000001/config.yaml", b"lr: 0.02\n")
    write(store, 1)
    store.verify(1)


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("config.yaml", b"lr: 0.02\n", "differs from what was written"),
        ("config.yaml", b"lr", "2 bytes long, but 9 were written"),
        ("config.yaml", None, "lacks config.yaml"),
        ("metadata.json", b"{}", "cannot be read"),
        ("metadata.json", b"\xff", "cannot be read"),
    ],
    ids=["a flipped bit", "a cut", "a file gone", "not ours", "not JSON"],
)
def test_damage_is_named_and_the_newest_whole_one_is_an_older_one(
    store: CheckpointStore, url: str, file: str, content: bytes | None, sentence: str
) -> None:
    write(store, 1)
    write(store, 2)
    change(url, f"step-000002/{file}", content)
    with pytest.raises(CheckpointDamaged, match=sentence):
        store.verify(2)
    newest, [damage] = store.newest_whole()
    assert newest is not None
    assert (newest.step, damage.step) == (1, 2)
    assert sentence in damage.reason


def test_a_changed_metric_is_damage_too(store: CheckpointStore, url: str) -> None:
    write(store, 1, loss=0.5)
    filesystem, root = fsspec.core.url_to_fs(url)
    path = f"{root}/step-000001/metadata.json"
    filesystem.pipe_file(path, filesystem.cat_file(path).replace(b'"loss": 0.5', b'"loss": 0.1'))
    with pytest.raises(CheckpointDamaged, match="changed after it was written"):
        store.verify(1)
    assert store.readable() == []


def test_metrics_do_not_recreate_a_checkpoint_during_its_removal(store: CheckpointStore) -> None:
    write(store, 1)

    def measure() -> None:
        with pytest.raises(NoCheckpoint):
            store.add_metrics(1, {"reward": 1.0})

    store.remove(1, measure)
    assert (store.steps(), store.leftovers()) == ([], [])


def test_metrics_do_not_cover_damage_up(store: CheckpointStore, url: str) -> None:
    write(store, 1)
    change(url, "step-000001/metadata.json", b"{}")
    with pytest.raises(CheckpointDamaged):
        store.add_metrics(1, {"reward": 1.0})


def test_only_intact_checkpoints_that_no_rule_keeps_are_removable(store: CheckpointStore, url: str) -> None:
    for step in (1, 2, 3, 4):
        write(store, step)
    change(url, "step-000001/metadata.json", b"{}")
    removable = store.removable(Retention(keep_last=1))
    assert [metadata.step for metadata in removable] == [2, 3]


def test_a_removal_without_its_end_is_no_checkpoint_and_is_found_with_its_files(store: CheckpointStore) -> None:
    write(store, 1)

    def fail() -> None:
        assert store.steps() == []
        raise ConnectionError

    with pytest.raises(ConnectionError):
        store.remove(1, fail)
    [name] = store.leftovers()
    assert store.read_leftover(name, "trainer_state.pt") == bytes([1]) * 100
    assert store.read_leftover(name, "optimizer.pt") is None
    store.remove_leftover(name)
    assert store.leftovers() == []


@pytest.mark.slow("starts and kills a program for each operation on files")
def test_a_kill_between_any_two_operations_on_files_leaves_whole_checkpoints_alone(tmp_path: Path) -> None:
    """The process writes step 3 and removes step 1. Afterwards step 3 can be written."""
    program = [sys.executable, killed_writes.__file__, str(tmp_path)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[4])}
    printed = subprocess.run(program, check=True, capture_output=True, text=True, env=environment).stdout
    lives = [json.loads(line) for line in printed.splitlines()]
    assert len(lives) > 15
    assert [life["killed"] for life in lives] == [True] * (len(lives) - 1) + [False]
    for life in lives:
        assert life["damaged"] == []
        assert life["steps"] in ([1, 2], [1, 2, 3], [2, 3])
        assert life["again"] in ([1, 2, 3], [2, 3])
        assert life["leftovers"] == life["others"] == []
    assert lives[0]["steps"] == [1, 2]
    assert lives[-1]["steps"] == [2, 3]


def test_a_kill_between_any_two_operations_on_an_object_store_leaves_whole_checkpoints_alone() -> None:
    operations, killed, seen = 0, True, set()
    while killed:
        CutOffBucket.empty()
        store = CheckpointStore(BUCKET)
        write(store, 1)
        write(store, 2)
        CutOffBucket.left = operations
        try:
            killed_writes.change_all(store)
            killed = False
        except Killed:
            pass
        CutOffBucket.left = None
        assert [step for step in store.steps() if killed_writes.is_damaged(store, step)] == []
        seen.add(tuple(store.steps()))
        for name in store.leftovers():
            store.remove_leftover(name)
        if 3 not in store.steps():
            write(store, 3)
        assert store.leftovers() == []
        operations += 1
    CutOffBucket.empty()
    assert operations > 8
    assert seen == {(1, 2), (1, 2, 3), (2, 3)}


def test_a_missing_step_and_a_missing_file_are_named(store: CheckpointStore) -> None:
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 7 in"):
        store.verify(7)
    write(store, 1)
    with pytest.raises(NoCheckpoint, match=r"step-000001 has no optimizer\.pt"):
        store.open(1, "optimizer.pt")


def test_a_directory_with_another_steps_checkpoint_is_damaged(store: CheckpointStore, url: str) -> None:
    write(store, 1)
    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.copy(f"{root}/step-000001", f"{root}/step-000002", recursive=True)
    with pytest.raises(CheckpointDamaged, match="step-000002 contains the checkpoint of step 1"):
        store.verify(2)


def test_a_negative_step_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(ValueError, match="counted from 0"):
        store.require_free(-1)
