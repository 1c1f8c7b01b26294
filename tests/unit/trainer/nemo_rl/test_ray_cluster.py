"""What a Ray of our own may see of this process, and what is left of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from tinsmith_trainer.engines.nemo_rl import ray_cluster
from tinsmith_trainer.engines.nemo_rl.ray_cluster import is_passed_on, new_folder


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "TINSMITH_API_KEY", "WANDB_API_KEY"])
def test_keys_stay_in_the_worker(name: str) -> None:
    assert not is_passed_on(name)


@pytest.mark.parametrize("name", ["PATH", "PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "RAY_AUTH_TOKEN"])
def test_ranks_get_what_they_compute_with(name: str) -> None:
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
    """A machine on which nobody has run Ray by hand has no /tmp/ray, and many have a long $TMPDIR."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=ray_cluster.SHORT_FOLDER) as usual:
        monkeypatch.setattr(ray_cluster, "RAY_FOLDER", "/nowhere")
        monkeypatch.setattr(tempfile, "tempdir", usual)

        made = Path(new_folder())

        made.rmdir()
        assert (made.parent == Path(usual)) is stays
        assert len(f"{made}{ray_cluster.BELOW_FOLDER}") <= ray_cluster.LONGEST_SOCKET_BYTES
