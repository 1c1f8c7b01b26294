"""The promises of a checkpoint root of any kind, between the workers that write and the servers that read."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyrage
import pytest
from s3fs import S3FileSystem
from support.engine.reference import MODULE, ReferenceEngine
from tinsmith_server.errors import CheckpointDamaged
from tinsmith_server.services.checkpoints.files import CheckpointFiles
from tinsmith_server.services.checkpoints.manifests import checked, saved_files
from tinsmith_server.services.training.adapter_imports import Upload
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot, WrittenCheckpoint
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.errors import CheckpointInvalid, ServerError

ENGINE = ReferenceEngine()
BASE = ENGINE.base_model()
FILES = ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"]
MIB = 2**20


def trained_state(seed: int = 1) -> AdapterState:
    ENGINE.create_adapter("a", LoraSpec(rank=2, alpha=32.0, seed=seed))
    return ENGINE.state("a")


def write(root: str, *, seq_id: int = 3, epoch: int = 1, state: AdapterState | None = None) -> WrittenCheckpoint:
    state = state or trained_state()
    return CheckpointRoot(root).write("sess:train:0", seq_id, epoch, "training", state, BASE, "weights")


def change(root: str, written: WrittenCheckpoint, name: str, content: bytes | None) -> None:
    """Rewrite or remove a file, as another program does."""
    fs, path = fsspec.core.url_to_fs(f"{root}/{written.directory}/{name}")
    if content is None:
        fs.rm_file(path)
    else:
        fs.pipe_file(path, content)


def content_of(root: str, written: WrittenCheckpoint, name: str) -> bytes:
    fs, path = fsspec.core.url_to_fs(f"{root}/{written.directory}/{name}")
    return bytes(fs.cat_file(path))


def read(root: str, written: WrittenCheckpoint) -> AdapterState:
    return CheckpointRoot(root).read(written.directory, written.manifest_digest, BASE).state


def test_another_worker_loads_a_saved_checkpoint_bit_for_bit(root: str) -> None:
    state = trained_state()
    loaded = read(root, write(root, state=state))
    assert loaded.lora == state.lora
    for name, value in loaded.tensors.items():
        assert value.tobytes() == state.tensors[name].tobytes(), name


def test_an_imported_checkpoint_is_in_the_folder_that_a_server_reserves_for_it(root: str) -> None:
    upload = Upload("lab", "org/tiny", {}, None, "uploads/1-x", "sess-1")
    written = CheckpointRoot(root).write(upload.run_id, 0, 77, "sampler", trained_state(), BASE, "external_weights")
    assert written.directory.startswith(f"{upload.folder}/")


def test_a_save_that_is_repeated_finds_its_own_manifest_and_writes_nothing(root: str) -> None:
    first = write(root, seq_id=1, epoch=1)
    write(root, seq_id=10, epoch=1)
    assert write(root, seq_id=1, epoch=2) == first


def test_only_its_recipients_can_read_an_encrypted_checkpoint(root: str) -> None:
    identity, other = (pyrage.x25519.Identity.generate() for _ in range(2))
    recipients = [str(each.to_public()) for each in (identity, other)]
    plain = write(root, seq_id=1)
    written = CheckpointRoot(root).write(
        "sess:train:0", 2, 1, "training", trained_state(), BASE, "weights", age_recipients=recipients
    )
    for name in FILES:
        ciphertext = content_of(root, written, f"{name}.age")
        assert all(pyrage.decrypt(ciphertext, [key]) == content_of(root, plain, name) for key in (identity, other))
    with pytest.raises(CheckpointInvalid, match="encrypted for age recipients"):
        read(root, written)


def test_an_encrypted_save_that_is_repeated_is_written_again_and_the_first_one_stays(root: str) -> None:
    """Encryption draws a new key each time, so that no attempt can tell an earlier one for its own."""
    recipient = str(pyrage.x25519.Identity.generate().to_public())
    first, second = (
        CheckpointRoot(root).write(
            "sess:train:0", 2, epoch, "training", trained_state(), BASE, "weights", age_recipients=[recipient]
        )
        for epoch in (1, 2)
    )
    assert first.directory != second.directory
    assert all(content_of(root, each, "manifest.json") for each in (first, second))


def test_a_save_that_died_before_its_manifest_does_not_exist_and_is_made_again(root: str) -> None:
    first = write(root)
    change(root, first, "manifest.json", None)
    change(root, first, FILES[1], b"half")
    with pytest.raises(CheckpointInvalid, match=r"manifest\.json is missing"):
        read(root, first)
    read(root, write(root))


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_altered_is_refused_by_its_name(root: str, name: str) -> None:
    written = write(root)
    content = content_of(root, written, name)
    change(root, written, name, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointInvalid, match=f"is damaged: {name}"):
        read(root, written)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_is_refused_by_its_name(root: str, name: str) -> None:
    written = write(root)
    change(root, written, name, None)
    with pytest.raises(CheckpointInvalid, match=f"{name} is missing"):
        read(root, written)


def test_a_server_lists_files_written_after_its_first_look(root: str) -> None:
    files = CheckpointFiles(root)
    written = write(root, seq_id=1)
    assert sorted(files.list(written.directory)) == FILES
    later = write(root, seq_id=2)
    assert sorted(files.list(later.directory)) == FILES
    files.remove(later.directory)
    assert files.list(later.directory) == {}
    write(root, seq_id=2)
    assert sorted(files.list(later.directory)) == FILES


def test_a_server_reads_the_files_of_a_worker(root: str) -> None:
    written = write(root)
    files = CheckpointFiles(root)
    for name, size_bytes in files.list(written.directory).items():
        content = b"".join(files.read(written.directory, name))
        assert len(content) == size_bytes
        assert content == content_of(root, written, name)
    with pytest.raises(FileNotFoundError):
        files.read(written.directory, "never")


@pytest.mark.parametrize("name", FILES)
def test_files_from_a_server_are_compared_with_the_manifest_of_the_worker(root: str, name: str) -> None:
    written, files = write(root), CheckpointFiles(root)
    saved = saved_files(files, written.directory, written.manifest_digest)
    assert sorted(saved) == FILES
    content = content_of(root, written, name)
    assert b"".join(checked(files.read(written.directory, name), saved[name], name)) == content
    change(root, written, name, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointDamaged, match=f"the file {name} was altered"):
        list(checked(files.read(written.directory, name), saved[name], name))
    change(root, written, name, None)
    with pytest.raises(CheckpointDamaged, match=f"{name} is missing"):
        saved_files(files, written.directory, written.manifest_digest)


def test_a_copy_that_a_server_makes_is_the_same_checkpoint_elsewhere(root: str) -> None:
    state = trained_state()
    written = write(root, state=state)
    files = CheckpointFiles(root)
    names = [*FILES, "manifest.json"]
    files.copy(written.directory, "weights/copy/0-0", names)
    files.remove(written.directory)
    copy = replace(written, directory="weights/copy/0-0")
    assert read(root, copy).tensors.keys() == state.tensors.keys()
    with pytest.raises(FileNotFoundError):
        files.copy(written.directory, "weights/other/0-0", names)


def test_a_disk_without_second_names_gets_files_of_its_own_that_are_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_names: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no second names here")

    root = tmp_path.as_uri()
    written = write(root)
    monkeypatch.setattr(os, "link", refuse)
    CheckpointFiles(root).copy(written.directory, "weights/copy", [*FILES, "manifest.json"])
    copied = tmp_path / "weights" / "copy"
    assert sorted(file.name for file in copied.iterdir()) == sorted([*FILES, "manifest.json"])
    assert {file.stat().st_mode & 0o777 for file in copied.iterdir()} == {0o444}
    assert not any(file.samefile(tmp_path / written.directory / file.name) for file in copied.iterdir())
    read(root, replace(written, directory="weights/copy"))


def test_removing_is_repeatable_and_takes_no_neighbour_along(root: str) -> None:
    files = CheckpointFiles(root)
    one, ten = write(root, seq_id=1, epoch=1), write(root, seq_id=1, epoch=10, state=trained_state(seed=2))
    assert ten.directory.startswith(one.directory)
    for _ in range(2):
        files.remove(one.directory)
    assert files.list(one.directory) == {}
    read(root, ten)


def test_saves_and_loads_of_many_threads_do_not_mix(root: str) -> None:
    checkpoints, outcomes = CheckpointRoot(root), dict[int, bool]()
    states = {seq_id: trained_state(seed=seq_id) for seq_id in range(8)}

    def save_and_load(seq_id: int) -> None:
        written = checkpoints.write("sess:train:0", seq_id, 1, "sampler", states[seq_id], BASE, "ephemeral")
        loaded = checkpoints.read(written.directory, written.manifest_digest, BASE).state
        outcomes[seq_id] = all(
            value.tobytes() == states[seq_id].tensors[name].tobytes() for name, value in loaded.tensors.items()
        )

    threads = [threading.Thread(target=save_and_load, args=(seq_id,)) for seq_id in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == dict.fromkeys(states, True)


def test_a_large_adapter_goes_in_parts_and_comes_back_whole(bucket: str) -> None:
    """Above 100 MiB an upload has several parts."""
    state = trained_state()
    large = np.arange(110 * MIB // 4, dtype=np.float32).reshape(2, -1)
    state = replace(state, tensors={**state.tensors, f"weights/{MODULE}.lora_A": large})
    written = write(bucket, state=state)
    assert written.size_bytes > 110 * MIB
    assert read(bucket, written).tensors[f"weights/{MODULE}.lora_A"].tobytes() == large.tobytes()


def test_a_file_of_many_fetches_is_downloaded_whole(root: str) -> None:
    state = trained_state()
    large = np.arange(20 * MIB // 4, dtype=np.float32).reshape(2, -1)
    written = write(root, state=replace(state, tensors={**state.tensors, f"weights/{MODULE}.lora_A": large}))
    downloaded = CheckpointFiles(root).read(written.directory, FILES[1])
    assert b"".join(downloaded) == content_of(root, written, FILES[1])


def test_a_bucket_that_is_not_there_is_not_made_by_mistake(s3: object) -> None:
    with pytest.raises(ServerError, match="could not be saved to s3://no-such-bucket"):
        write("s3://no-such-bucket/prefix")
    with pytest.raises(ServerError, match="bucket does not exist"):
        write("s3://no-such-bucket/prefix")


def test_the_region_comes_from_the_environment_as_in_other_aws_clients(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are signed for it, and a store may refuse those that are signed for another."""
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    for open_there in (CheckpointRoot, CheckpointFiles):
        S3FileSystem.clear_instance_cache()
        open_there(bucket)
        opened = S3FileSystem.current()
        opened.find(bucket)
        assert opened.s3.meta.region_name == "eu-north-1"
    S3FileSystem.clear_instance_cache()
