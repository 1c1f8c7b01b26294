"""The environment of a private Ray, and its remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tinsmith_trainer.engines.megatron import ray_cluster
from tinsmith_trainer.engines.megatron.ray_cluster import RayCluster, is_passed_on, new_folder
from tinsmith_trainer.errors import ServerError


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "TINSMITH_API_KEY", "WANDB_API_KEY"])
def test_keys_stay_in_the_worker(name: str) -> None:
    assert not is_passed_on(name)


@pytest.mark.parametrize("name", ["PATH", "PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "RAY_AUTH_TOKEN"])
def test_ranks_get_the_variables_of_their_computation(name: str) -> None:
    assert is_passed_on(name)


def test_folders_of_dead_processes_go_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "RAY_FOLDER", str(tmp_path))
    left = [f"tinray-{2**30}-dead", f"tinray-{os.getpid()}-earlier"]
    others = [f"tinray-{os.getppid()}-alive", "tinsmith-test-1-x", "tinray-x-y", "session_latest"]
    for name in (*left, *others):
        (tmp_path / name).mkdir()

    made = Path(new_folder())

    assert made.parent == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {made.name, *others}


@pytest.mark.parametrize(("prefix", "stays"), [("tin-", True), ("what-a-cluster-gives-to-one-user-", False)])
def test_sockets_of_ray_have_names_that_the_kernel_takes(
    prefix: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine on which Ray never ran by hand has no /tmp/ray, and many have a long $TMPDIR."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=ray_cluster.SHORT_FOLDER) as usual:
        monkeypatch.setattr(ray_cluster, "RAY_FOLDER", "/nowhere")
        monkeypatch.setattr(tempfile, "tempdir", usual)

        made = Path(new_folder())

        made.rmdir()
        assert (made.parent == Path(usual)) is stays
        assert len(f"{made}{ray_cluster.BELOW_FOLDER}") <= ray_cluster.LONGEST_SOCKET_BYTES


PROGRAM = "import time; print('up', flush=True); time.sleep(600)"


@dataclass
class Starts:
    """A Ray whose first starts fail, and leave a program of theirs behind."""

    failing: int
    folders: list[str] = field(default_factory=list)
    programs: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __call__(self, folder: str, **_resources: object) -> None:
        self.folders.append(folder)
        program = subprocess.Popen([sys.executable, "-c", PROGRAM, folder], stdout=subprocess.PIPE)
        self.programs.append(program)
        # Before it runs, the kernel does not tell yet what it was given.
        assert program.stdout is not None
        assert program.stdout.readline() == b"up\n"
        if len(self.folders) <= self.failing:
            raise Exception("The current node timed out during startup.")


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    starts = Starts(failing=1)
    monkeypatch.setattr(ray_cluster, "RAY_FOLDER", str(tmp_path))
    monkeypatch.setattr(ray_cluster, "_start", starts)
    monkeypatch.setattr(ray_cluster, "_shut_down", lambda: None)
    yield starts
    for program in starts.programs:
        program.kill()
        program.communicate()


def test_a_ray_that_was_too_slow_once_is_started_again_alone(starts: Starts) -> None:
    RayCluster(None, cpus=1)

    first, second = starts.folders
    assert (Path(first).exists(), Path(second).exists()) == (False, True)
    assert starts.programs[0].wait(60) == -signal.SIGKILL
    assert starts.programs[1].poll() is None


def test_a_ray_that_is_too_slow_each_time_is_an_error_and_leaves_nothing(starts: Starts, tmp_path: Path) -> None:
    starts.failing = 2

    with pytest.raises(ServerError, match=r"Ray in this container does not answer: .*timed out during startup"):
        RayCluster(None, cpus=1)

    assert list(tmp_path.iterdir()) == []
    assert [program.wait(60) for program in starts.programs] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(("gpus", "visible"), [(2, "4,5"), (0, None)], ids=["ranks on GPUs", "ranks on CPUs"])
def test_a_ray_with_gpus_sees_those_that_are_the_workers(
    gpus: int, visible: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    seen: list[str | None] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(ray_cluster, "require_token", lambda: None)
    monkeypatch.setattr(ray, "init", lambda **_: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")))
    ray_cluster._start(str(tmp_path), cpus=1, gpus=gpus, shows_actors=False)
    assert seen == [visible]
