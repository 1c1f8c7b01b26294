"""A worker on one's own machine leaves a core to the server and to the program that trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith_server.fleet.local.devices import THREADS_VARIABLE, cores_of, usable_threads
from tinsmith_server.fleet.local.process import worker_environment


@pytest.mark.parametrize(
    ("cores", "quota", "threads"),
    [
        pytest.param(1, "", 1, id="one core"),
        pytest.param(2, "", 1, id="two cores"),
        pytest.param(8, "max 100000\n", 7, id="no quota"),
        pytest.param(64, "250000 100000\n", 2, id="a container's quota, rounded up"),
        pytest.param(4, "1600000 100000\n", 3, id="a quota above the cores"),
        pytest.param(4, "nonsense", 3, id="an unreadable quota"),
        pytest.param(4, "50000 100000", 1, id="half a core"),
    ],
)
def test_one_core_is_left_and_a_quota_is_kept(cores: int, quota: str, threads: int) -> None:
    assert usable_threads(cores, quota) == threads


def test_hyper_threads_of_a_core_count_once_and_processors_that_say_nothing_for_themselves(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert cores_of(range(4), tmp_path) == 2
    assert cores_of([0, 3], tmp_path) == 2
    assert cores_of(range(6), tmp_path) == 4


def test_a_number_from_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS_VARIABLE, "13")
    assert worker_environment()[THREADS_VARIABLE] == "13"
    monkeypatch.delenv(THREADS_VARIABLE)
    assert int(worker_environment()[THREADS_VARIABLE]) >= 1
