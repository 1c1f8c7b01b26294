"""Checkpoints under the root: immutable, complete or absent, bound to their base model."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import fsspec
import numpy as np
import pytest
from support.engine.reference import ReferenceEngine
from tinsmith_trainer.checkpoints import storage
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot, WrittenCheckpoint
from tinsmith_trainer.checkpoints.storage import CheckpointStorage
from tinsmith_trainer.disk.durable_files import MemoryFor, ReadFile, read_hashed
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.errors import CheckpointInvalid, ServerError, StorageUnavailable, UserError

ENGINE = ReferenceEngine()
BASE = ENGINE.base_model()


def trained_state() -> AdapterState:
    ENGINE.create_adapter("a", LoraSpec(rank=2, alpha=32.0, seed=1))
    return ENGINE.state("a")


def write(root: CheckpointRoot, *, seq_id: int = 3, epoch: int = 1) -> WrittenCheckpoint:
    return root.write("sess:train:0", seq_id, epoch, "training", trained_state(), BASE, "weights")


@pytest.fixture(params=["file", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointRoot:
    """Return a root in a local folder, and one in a file system that only fsspec knows."""
    if request.param == "file":
        return CheckpointRoot(f"file://{tmp_path}")
    return CheckpointRoot(f"memory://{tmp_path.name}")


def replace_file(path: Path, content: bytes) -> None:
    """Files of a checkpoint are read-only for everyone but root, and their folder is not."""
    path.unlink()
    path.write_bytes(content)


def test_a_saved_checkpoint_is_loaded_bit_for_bit(root: CheckpointRoot) -> None:
    written = write(root)
    loaded = root.read(written.directory, written.manifest_digest, BASE)
    assert loaded.has_optimizer
    expected = {name: value for name, value in trained_state().tensors.items() if not name.startswith("gradients/")}
    assert {name: value.tobytes() for name, value in loaded.state.tensors.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


def test_the_names_of_a_saves_files_are_synced_once_before_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    kept = CheckpointStorage(f"file://{tmp_path}/root")
    monkeypatch.setattr(os, "fsync", note)
    kept.write("model/1", {"weights": [b"w"], "config": [b"c"]}, "manifest", lambda written: b"m")
    assert synced == [".weights.tmp", ".config.tmp", "1", ".manifest.tmp", "1", "model", "root", tmp_path.name]


@pytest.mark.core("durability 9")
def test_a_save_that_died_before_its_manifest_is_written_again(tmp_path: Path) -> None:
    root = CheckpointRoot(f"file://{tmp_path}")
    first = write(root)
    (tmp_path / first.directory / "manifest.json").unlink()
    replace_file(tmp_path / first.directory / "adapter_model.safetensors", b"half")
    again = write(root)
    assert again == first
    root.read(again.directory, again.manifest_digest, BASE)


@pytest.mark.core("durability 9")
def test_a_manifest_that_was_tampered_with_is_refused(tmp_path: Path) -> None:
    root = CheckpointRoot(f"file://{tmp_path}")
    written = write(root)
    path = tmp_path / written.directory / "manifest.json"
    replace_file(path, json.dumps(json.loads(path.read_text()) | {"optimizer_step": 99}).encode())
    with pytest.raises(CheckpointInvalid, match="altered"):
        root.read(written.directory, written.manifest_digest, BASE)


@pytest.mark.parametrize("number", range(4), ids=["manifest", "config", "weights", "optimizer"])
def test_one_bad_read_of_a_sound_checkpoint_is_read_again_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    root = CheckpointRoot(f"file://{tmp_path}")
    written = write(root)
    reads: list[bool] = []

    def flip_once(path: Path, memory_for: MemoryFor, *, from_disk: bool = False) -> ReadFile:
        reads.append(from_disk)
        found = read_hashed(path, memory_for, from_disk=from_disk)
        content = bytes(found.content)
        return ReadFile(content[:-1] + b"?", "0" * 64) if len(reads) == number + 1 else found

    monkeypatch.setattr(storage, "read_hashed", flip_once)
    loaded = root.read(written.directory, written.manifest_digest, BASE)
    assert loaded.has_optimizer
    assert reads[-4:] == [True] * 4


class DriverError(Exception):
    """Drivers of object stores have classes of their own for what networks do."""


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "no connection"), StorageUnavailable),
        (TimeoutError("timed out"), StorageUnavailable),
        (DriverError("could not connect to the endpoint"), StorageUnavailable),
        (OSError(errno.EREMOTEIO, "500"), StorageUnavailable),
        (OSError(errno.EBUSY, "503"), StorageUnavailable),
        (PermissionError("403"), StorageUnavailable),
        (PermissionError(errno.EACCES, "no permission for the folder"), ServerError),
        (OSError(errno.EROFS, "read-only"), ServerError),
        (OSError(errno.EINVAL, "400"), ServerError),
        (ValueError("no such option"), ServerError),
    ],
    ids=lambda value: "" if isinstance(value, type) else str(value),
)
def test_reads_and_writes_distinguish_temporary_from_permanent_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, expected: type[ServerError]
) -> None:
    root = CheckpointRoot(f"file://{tmp_path}")
    written = write(root)

    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(CheckpointStorage, "_read_file_hashed", fail)
    monkeypatch.setattr(CheckpointStorage, "_write_file", fail)
    with pytest.raises(ServerError, match="cannot be read from") as read:
        root.read(written.directory, written.manifest_digest, BASE)
    with pytest.raises(ServerError, match="could not be saved to") as wrote:
        write(root, seq_id=4)
    assert [read.type, wrote.type] == [expected, expected]


def test_a_missing_file_is_no_outage(tmp_path: Path) -> None:
    """Waiting for it would be in vain."""
    with pytest.raises(CheckpointInvalid, match="incomplete"):
        CheckpointRoot(f"file://{tmp_path}").read("weights/none/1-1", "digest", BASE)


def test_the_weights_are_in_pefts_layout(tmp_path: Path) -> None:
    root = CheckpointRoot(f"file://{tmp_path}")
    written = write(root)
    with fsspec.open(f"file://{tmp_path}/{written.directory}/adapter_config.json") as file:
        config = json.load(file)
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 32.0)
    from safetensors.numpy import load_file

    tensors = load_file(tmp_path / written.directory / "adapter_model.safetensors")
    assert set(tensors) == {f"base_model.model.{config['target_modules'][0]}.lora_{side}.weight" for side in "AB"}
    assert all(tensor.dtype == np.float32 for tensor in tensors.values())


def test_assets_are_read_below_their_tenants_folder_alone(tmp_path: Path) -> None:
    root = CheckpointRoot(f"file://{tmp_path}")
    for tenant in ("alice", "bob"):
        (tmp_path / "assets" / tenant / "photos").mkdir(parents=True)
    (tmp_path / "assets" / "alice" / "photos" / "cat.png").write_bytes(b"a cat")

    assert root.read_asset("alice", "photos/cat.png") == b"a cat"
    with pytest.raises(UserError, match=r"'photos/cat.png' does not exist"):
        root.read_asset("bob", "photos/cat.png")


@pytest.mark.parametrize("tenant", ["alice/photos", "..", "", ".", "a b", "alice:photos", "Alice", "alice.", "a\\b"])
def test_a_tenant_has_no_assets_when_its_name_is_no_folder_name(tmp_path: Path, tenant: str) -> None:
    """`a/b` would be within the assets of `a`, `..` the whole root, and `a:b` the same as `a.b`."""
    for folder in ("assets/alice/photos", "assets/alice.photos", "assets/Alice", "assets/alice.", "assets/a b"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "cat.png").write_bytes(b"a cat")
    (tmp_path / "cat.png").write_bytes(b"a cat")
    with pytest.raises(UserError, match="a tenant's name has"):
        CheckpointRoot(f"file://{tmp_path}").read_asset(tenant, "cat.png")


@pytest.mark.parametrize(
    "location",
    [
        "../alice/photos/cat.png",
        "/etc/passwd",
        "photos//cat.png",
        "./cat.png",
        "http://host/cat.png",
        "a\\..\\b",
        "",
        "..",
    ],
)
def test_a_location_that_is_not_a_path_below_the_assets_is_refused(root: CheckpointRoot, location: str) -> None:
    with pytest.raises(UserError, match="is not a path below this tenant's assets"):
        root.read_asset("alice", location)


def test_a_manifest_that_is_not_json_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    root = CheckpointRoot(f"file://{tmp_path}")
    written = write(root)
    assert root.digest_of(written.directory) == written.manifest_digest
    replace_file(tmp_path / written.directory / "manifest.json", b"{")
    with pytest.raises(CheckpointInvalid, match="has a manifest that is not valid JSON"):
        root.digest_of(written.directory)


def test_a_root_of_an_unknown_protocol_cannot_be_opened() -> None:
    with pytest.raises(ServerError, match="The checkpoint root nowhere://bucket cannot be opened"):
        CheckpointRoot("nowhere://bucket")
