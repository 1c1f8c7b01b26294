"""Environments of the SDK's generations: what is the same for all comes from the lock, and PyTorch from one of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import sdk_environments
from package_environment import is_made
from sdk_environments import LOCK, PYTORCH, environment_directory, make_sdk_environment, site_packages, without_sdk
from sdk_generations import GENERATIONS, TESTED


def test_each_version_lock_and_python_has_an_environment_of_its_own(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("numpy==1\n")
    made = {environment_directory(version, lock, "3.11.7") for version in (*TESTED, PYTORCH)}
    assert len(made) == len(TESTED) + 1
    made |= {environment_directory("0.38.0", lock, "3.12.1"), environment_directory("0.38.0")}
    assert len(made) == len(TESTED) + 3


def test_the_lock_keeps_all_but_the_sdk() -> None:
    lock, kept = LOCK.read_text(), without_sdk(LOCK.read_text())
    assert "\ntinker==" in lock
    assert "\ntinker" not in kept
    assert "\npydantic==" in kept
    assert lock.startswith(kept[:1000])


def test_an_environment_is_lent_the_pytorch_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = []

    def install(environment: Path, requirement: str, options: object) -> None:
        installed.append(requirement)
        site_packages(environment).mkdir(parents=True)

    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(sdk_environments, "_install", install)
    for version in ("0.3.0", "0.38.0", "0.3.0"):
        made = make_sdk_environment(version)
        assert is_made(made)
        lent = (site_packages(made) / "pytorch.pth").read_text().strip()
        assert lent == str(site_packages(environment_directory(PYTORCH)))
    assert installed == ["torch", "tinker==0.3.0", "tinker==0.38.0"]


def test_generations_name_versions_once_oldest_first() -> None:
    numbers = [tuple(map(int, version.split("."))) for version in TESTED]
    assert numbers == sorted(set(numbers))
    assert all(generation.tested for generation in GENERATIONS)
