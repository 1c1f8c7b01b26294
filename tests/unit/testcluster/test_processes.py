"""Processes of a cluster are ended by who they are, not by their number alone."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from testcluster.errors import ClusterError
from testcluster.places import Places
from testcluster.processes import ProcessTable, Running, end, identify, marked

SLEEP = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ProcessTable]:
    monkeypatch.setattr("testcluster.places.clusters_directory", lambda: tmp_path)
    table = ProcessTable(Places("unit"))
    yield table
    end(marked(table.places.directory))


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL) as process:
        yield process
        process.kill()


def known(process: subprocess.Popen[bytes]) -> Running:
    running = identify(process.pid)
    assert running is not None
    return running


def test_a_process_that_took_over_a_pid_is_left_alone(bystander: subprocess.Popen[bytes]) -> None:
    earlier = replace(known(bystander), start_ticks=1)
    assert not earlier.is_alive()
    end([earlier])
    assert known(bystander).is_alive()


def test_a_started_process_is_found_by_name_and_stopped(table: ProcessTable) -> None:
    table.start("sleeper", SLEEP)
    again = ProcessTable(table.places)
    assert again.names() == ["sleeper"]
    running = again.running("sleeper")
    assert running.is_alive()
    again.stop("sleeper")
    assert not running.is_alive()
    assert again.names() == []


def test_a_process_that_ends_while_others_wait_for_it_is_quoted(table: ProcessTable) -> None:
    table.start(
        "failing",
        [sys.executable, "-c", "import time; print('no such flag', flush=True); time.sleep(2); raise SystemExit(2)"],
    )
    with pytest.raises(ClusterError, match=r"failing ended before it is ready(?s:.*)no such flag"):
        table.wait_until("it is ready", lambda: False, needs=["failing"], seconds=20)


def test_a_signal_that_is_not_heeded_ends_in_an_error(
    bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testcluster.processes._END_SECONDS", 0.0)
    with pytest.raises(ClusterError, match=f"{bystander.pid} did not end"):
        end([known(bystander)], signal.SIGCONT)
