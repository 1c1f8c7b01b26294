"""An environment of its own is made once for each lock and Python; vLLM's plugin is for the version in its lock."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

import package_environment
import pytest
from package_environment import (
    VLLM,
    make_environment,
)

METADATA = Path(__file__).parents[1] / "support" / "token_server" / "vllm_cpu" / "vllm.dist-info" / "METADATA"


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


def test_it_is_installed_once(cache: Path) -> None:
    install = Installer()
    for _ in range(2):
        make_environment(cache / "a", install)
    assert install.found == [False]
    assert sorted(cache.iterdir()) == [cache / "a"], "no lock is left"


def test_an_unfinished_environment_is_created_again(cache: Path) -> None:
    install = Installer()
    (cache / "a" / "lib").mkdir(parents=True)
    make_environment(cache / "a", install)
    assert install.found == [False]
    assert package_environment.is_complete(cache / "a")


def test_the_plugin_is_made_for_the_version_that_is_installed() -> None:
    """vLLM looks up its own version under this name; without `cpu` in it no device is found."""
    locked = re.search(r"^vllm-cpu==(\S+)", VLLM.lock.read_text(), re.MULTILINE)
    assert locked is not None
    metadata = message_from_string(METADATA.read_text())
    assert (metadata["Name"], metadata["Version"]) == ("vllm", f"{locked[1]}+cpu")
