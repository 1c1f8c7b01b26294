"""The data directory belongs to the server's own user, whichever command starts the server."""

from __future__ import annotations

from pathlib import Path

from tinsmith_server.configuration import make_data_directory


def mode_of(folder: Path) -> int:
    return folder.stat().st_mode & 0o777


def test_a_new_data_directory_is_closed_to_other_users(tmp_path: Path) -> None:
    make_data_directory(tmp_path / "new" / "data")
    assert mode_of(tmp_path / "new" / "data") == 0o700


def test_a_data_directory_that_an_administrator_made_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o750)
    make_data_directory(tmp_path / "data")
    assert mode_of(tmp_path / "data") == 0o750
