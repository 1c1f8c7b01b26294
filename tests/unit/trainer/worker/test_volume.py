from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith_trainer.errors import VolumeUnsuitable
from tinsmith_trainer.oplog.journal import Journal
from tinsmith_trainer.worker import volume as volume_module
from tinsmith_trainer.worker.volume import Volume


def test_a_volume_that_cannot_be_written_names_the_required_owner(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VolumeUnsuitable, match=r"file/volume cannot be written: .*user \d+ may write"):
        Volume(tmp_path / "file" / "volume")


def test_a_volume_on_a_network_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_module, "file_system_of", lambda directory, mountinfo: "nfs4")
    with pytest.raises(VolumeUnsuitable, match="is on nfs4"):
        Volume(tmp_path / "volume")


def test_an_invalid_journal_is_a_fault_of_the_volume(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"words, not pages. " * 1000)
    with pytest.raises(VolumeUnsuitable, match=r"journal\.sqlite cannot be opened: .*resume from their checkpoints"):
        Journal(path)
