"""The packages of `make packages`: the same bytes each time, all files of the sources, and tools from the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import packages
import project_version
import pytest

WHEEL_SOURCES = {
    "operator/tinsmith_operator",
    "api_server/tinsmith_server",
    "trainer_image/tinsmith_trainer",
    "rpc/tinsmith_rpc",
    "client/tinsmith",
}
EXAMPLES = {"examples/first_steps.py", "examples/train"}
PUBLIC = packages.Repository("https://code.example/tinsmith", "v1.2.3")


@dataclass(frozen=True)
class Built:
    """The packages: from the whole checkout, and the wheel once more, from the source distribution alone."""

    sdist: Path
    wheel: Path
    again: Path

    @property
    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as files:
            [name] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
            return Parser().parsestr(files.read(name).decode())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("packages")
    source = folder / "source"
    packages.prepare(source, None)
    [sdist] = packages.build(source, folder / "sdist", "--sdist")
    [wheel] = packages.build(source, folder / "wheel", "--wheel")
    [again] = packages.build(sdist, folder / "again", "--wheel")
    return Built(sdist, wheel, again)


def tracked(*folders: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *folders], cwd=packages.ROOT, check=True, capture_output=True, text=True
    )
    return {name for name in listed.stdout.split("\0") if name and (packages.ROOT / name).is_file()}


@pytest.mark.slow("builds the packages")
def test_the_wheel_has_the_same_bytes_from_the_checkout_and_from_the_source_distribution(built: Built) -> None:
    assert built.wheel.read_bytes() == built.again.read_bytes()


@pytest.mark.slow("builds the packages")
def test_the_wheel_has_every_file_of_its_packages_and_no_other(built: Built) -> None:
    code = {name.partition("/")[2] for name in tracked(*WHEEL_SOURCES)}
    examples = {f"tinsmith/{name}" for name in tracked(*EXAMPLES)}
    with zipfile.ZipFile(built.wheel) as files:
        names = {name for name in files.namelist() if ".dist-info/" not in name}
    assert names == code | examples


@pytest.mark.slow("builds a package")
def test_the_wheel_has_the_manual_if_it_was_built(tmp_path: Path) -> None:
    (manual := tmp_path / "site").mkdir()
    (manual / "index.html").write_text("<!DOCTYPE html>")
    packages.prepare(tmp_path / "source", None, manual)
    [wheel] = packages.build(tmp_path / "source", tmp_path / "out", "--wheel")
    with zipfile.ZipFile(wheel) as files:
        assert files.read("tinsmith_server/manual/index.html") == b"<!DOCTYPE html>"


@pytest.mark.slow("builds the packages")
def test_the_source_distribution_has_no_tests_and_less_than_two_megabytes(built: Built) -> None:
    with tarfile.open(built.sdist) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {name.partition("/")[0] for name in names} >= {"LICENSE", "README.md", "pyproject.toml", "client"}
    assert not {name for name in names if name.startswith(("tests/", ".ci/", "dev/testcluster/"))}
    assert built.sdist.stat().st_size < 2_000_000


@pytest.mark.slow("builds the packages")
def test_the_metadata_has_one_version_and_no_link_that_an_index_cannot_follow(built: Built) -> None:
    metadata = built.metadata
    assert metadata["Version"] == project_version.project_version()
    assert metadata.get_all("Project-URL") is None
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert "## Try it" in text
    assert packages.RELATIVE_LINK.search(text) is None


def test_with_a_repository_links_and_metadata_name_the_files_of_the_release() -> None:
    text = "[how](docs/a.md#b), ![picture](docs/p.png), [here](#b), [site](https://example.com)"
    assert packages.readme_for_an_index(text, PUBLIC) == (
        "[how](https://code.example/tinsmith/blob/v1.2.3/docs/a.md#b), "
        "![picture](https://code.example/tinsmith/raw/v1.2.3/docs/p.png), [here](#b), [site](https://example.com)"
    )
    assert packages.readme_for_an_index(text, None) == "how, , [here](#b), [site](https://example.com)"
    assert 'Changelog = "https://code.example/tinsmith/blob/v1.2.3/CHANGELOG.md"' in PUBLIC.metadata


def test_every_place_that_repeats_the_version_has_that_of_the_project() -> None:
    places = list(project_version.found())
    assert {version for _, version in places} == {project_version.project_version()}
    assert {file for file, _ in places} >= {
        "charts/tinsmith/Chart.yaml",
        "api_server/Dockerfile",
        "operator/Dockerfile",
    }


def shown(*command: str | Path, **variables: str | Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        command,
        env=environment | {name: str(value) for name, value in variables.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def installed_by_uv(wheel: Path, folder: Path) -> Path:
    shown(
        packages.found_uv(), "tool", "install", "--python", sys.executable, wheel,
        UV_TOOL_DIR=folder / "tools", UV_TOOL_BIN_DIR=folder / "bin", PATH=f"{folder / 'bin'}:{os.environ['PATH']}",
    )  # fmt: skip
    return folder / "bin" / "tinsmith"


def installed_by_pip(wheel: Path, folder: Path) -> Path:
    """Install as pipx does: by pip, in an environment of its own."""
    shown(sys.executable, "-m", "venv", folder / "environment")
    shown(folder / "environment" / "bin" / "python", "-m", "pip", "install", "--quiet", wheel)
    return folder / "environment" / "bin" / "tinsmith"


@pytest.mark.slow("builds the packages, and installs the wheel from the package index")
@pytest.mark.parametrize("install", [installed_by_uv, installed_by_pip])
def test_the_bare_wheel_installs_as_a_tool_and_completes_its_commands(
    built: Built, tmp_path: Path, install: Callable[[Path, Path], Path]
) -> None:
    """tests/sdk/test_readme.py installs the extra `all`, and runs the demo."""
    tinsmith = install(built.wheel, tmp_path)
    assert shown(tinsmith, "--version") == f"tinsmith {project_version.project_version()}\n"
    completed = shown(tinsmith, _TINSMITH_COMPLETE="complete_bash", COMP_WORDS="tinsmith se", COMP_CWORD="1")
    assert completed.split() == ["serve"]
    refused = subprocess.run([tinsmith, "demo"], capture_output=True, text=True, check=False)
    assert "[server,trainer,client]" in refused.stderr
