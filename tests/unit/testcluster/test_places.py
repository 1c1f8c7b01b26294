"""Names and locks of test clusters."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from testcluster.errors import ClusterError
from testcluster.places import Places, locked


@pytest.mark.parametrize("name", ["", "Dev", "1dev", "a/b", "..", "a" * 21])
def test_a_name_that_could_leave_its_folder_or_outgrow_a_socket_is_refused(name: str) -> None:
    with pytest.raises(ClusterError, match="no name for a test cluster"):
        Places(name)


def test_a_lock_lets_one_in_at_a_time_and_leaves_no_file(tmp_path: Path) -> None:
    file, occupied = tmp_path / "locks" / "one.lock", tmp_path / "occupied"
    met: list[FileExistsError] = []

    def enter() -> None:
        for _ in range(50):
            with locked(file):
                try:
                    occupied.mkdir()
                    occupied.rmdir()
                except FileExistsError as error:
                    met.append(error)

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == []
    assert not file.exists()
