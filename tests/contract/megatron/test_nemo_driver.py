"""The process that makes NeMo RL's workers, and the real Ray that it starts for them on one node."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
from tinsmith_trainer.engines.megatron.ray_cluster import prepare_for_ray

prepare_for_ray()
from tinsmith_trainer.engines.nemo_rl.group import _join_ray
from tinsmith_trainer.engines.megatron.ray_cluster import stop_ray

folder = _join_ray(None)
import os, ray

task = ray.remote(lambda: (os.environ["RAY_AUTH_MODE"], os.environ["MARK"]))
print(folder, ray.get(task.remote()))
stop_ray(folder)
"""


@pytest.mark.timeout(300)
def test_a_driver_on_one_node_starts_a_ray_with_a_token_that_runs_tasks_and_leaves_nothing_behind() -> None:
    """Ray is imported long before it is started: the answers of ranks are its exceptions."""
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER],
        env={**os.environ, "MARK": "from the driver"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    folder, _, answer = ran.stdout.splitlines()[-1].partition(" ")
    assert answer == "('token', 'from the driver')"
    assert not Path(folder).exists()
    assert _programs_of(folder) == []


def _programs_of(folder: str) -> list[str]:
    """Ray gives each of its programs its folder by name."""
    told = {path: _read(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [line for line in told.values() if folder in line]


def _read(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has ended
        return ""
