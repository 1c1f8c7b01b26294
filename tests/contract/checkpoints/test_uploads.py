"""Files of adapters on their way in: whole or not at all, and gone with their upload, on each kind of root."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tinsmith_server.services.checkpoints.files import UploadFiles
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.errors import CheckpointInvalid

CONFIG, NAME = "adapter_config.json", "adapter_model.safetensors"
LATER = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def files(root: str) -> UploadFiles:
    return UploadFiles(root)


@pytest.fixture
def directory(files: UploadFiles) -> str:
    return files.new_directory("tenant", LATER)


def send(files: UploadFiles, directory: str, parts: list[bytes]) -> None:
    file = files.open(directory, NAME)
    for part in parts:
        file.write(part)
    file.finish()


def test_a_file_that_is_sent_again_is_another_file(tmp_path: Path) -> None:
    """A reader of the earlier file, or another name of it, keeps the earlier content."""
    files = UploadFiles(tmp_path.as_uri())
    directory = files.new_directory("tenant", LATER)
    send(files, directory, [b"first"])
    link = tmp_path / "link"
    link.hardlink_to(tmp_path / directory / NAME)
    send(files, directory, [b"second"])
    assert link.read_bytes() == b"first"
    assert [file.name for file in (tmp_path / directory).iterdir()] == [NAME]


def test_an_uploaded_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut it is whole or absent, and its sender has been told that it is there."""
    done: list[str] = []
    synced, renamed = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("sync"), synced(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("rename"), renamed(*names)))
    files = UploadFiles(tmp_path.as_uri())
    send(files, files.new_directory("tenant", LATER), [b"weights"])
    assert done[:2] == ["sync", "rename"]


def test_expired_uploads_are_swept_and_others_stay(files: UploadFiles, directory: str) -> None:
    living = files.new_directory("tenant", LATER + timedelta(hours=1))
    for one in (directory, living):
        send(files, one, [b"weights"])
    assert files.others_of("tenant", living) == {directory}
    files.sweep(LATER)
    assert files.others_of("tenant", "") == {living}
    assert files.others_of("stranger", "") == set()


def test_a_worker_reads_files_that_are_as_large_as_an_adapter_may_be_and_no_larger_ones(
    files: UploadFiles, directory: str, root: str
) -> None:
    for name, content in ((CONFIG, b"{}"), (NAME, b"weights")):
        file = files.open(directory, name)
        file.write(content)
        file.finish()
    worker = CheckpointRoot(root)
    assert worker.read_upload(directory, most_config_bytes=2, most_weights_bytes=7) == (b"{}", b"weights")
    with pytest.raises(
        CheckpointInvalid, match=r"adapter_model.safetensors has 7 bytes; the limit for the announced rank .* is 6"
    ):
        worker.read_upload(directory, most_config_bytes=2, most_weights_bytes=6)
    with pytest.raises(CheckpointInvalid, match=r"adapter_config.json has 2 bytes"):
        worker.read_upload(directory, most_config_bytes=1, most_weights_bytes=7)


def test_a_worker_says_which_file_is_not_there_or_empty(files: UploadFiles, directory: str, root: str) -> None:
    files.open(directory, CONFIG).finish()
    with pytest.raises(CheckpointInvalid, match=f"lacks {NAME}"):
        CheckpointRoot(root).read_upload(directory, most_config_bytes=2, most_weights_bytes=7)
    files.open(directory, NAME).finish()
    assert CheckpointRoot(root).read_upload(directory, most_config_bytes=2, most_weights_bytes=7) == (b"", b"")
