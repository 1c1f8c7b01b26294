"""Images come into a cluster that is not ours by the command that its owner names."""

from __future__ import annotations

from pathlib import Path

import pytest
from testcluster import __main__ as command
from testcluster.cluster import Cluster
from testcluster.errors import ClusterError
from testcluster.kubernetes.containerd import LoadedImage
from testcluster.loading import COMMAND_VARIABLE, REGISTRY_VARIABLE, LoadCommand, load_command
from testcluster.programs.archives import write_archive
from testcluster.project_images import ImagesNotBuilt

IMAGE = "tinsmith.local/tinsmith/test-hello:1"
EXISTING_CLUSTER = Cluster("", Path("/their/kubeconfig"), Path("kubectl"), ("only",))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (COMMAND_VARIABLE, REGISTRY_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Return an archive in a folder whose name a shell must not see unquoted."""
    folder = tmp_path / "my images"
    folder.mkdir()
    program = folder / "hello"
    program.write_bytes(bytes(64))
    return write_archive(folder / "hello.tar", IMAGE, program)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the file in which a program called `bring` records its arguments, one a line."""
    program, file = tmp_path / "bring", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {file}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return file


def test_the_named_command_is_given_archive_and_image(
    archive: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMAND_VARIABLE, "bring image-archive {archive} && bring --as {image}")
    assert EXISTING_CLUSTER.load_image(archive) == [LoadedImage(IMAGE)]
    assert calls.read_text().splitlines() == ["image-archive", str(archive), "--as", IMAGE]


@pytest.mark.parametrize(
    ("name", "in_full"),
    [
        ("team/trainer:1", "docker.io/team/trainer:1"),
        ("tinsmith.local/tinsmith/trainer:1", "tinsmith.local/tinsmith/trainer:1"),
        ("localhost:5000/trainer:1", "localhost:5000/trainer:1"),
        ("localhost/trainer:1", "localhost/trainer:1"),
        ("trainer:1", "docker.io/trainer:1"),
    ],
)
def test_pods_ask_for_an_image_by_its_name_in_full(name: str, in_full: str) -> None:
    assert LoadCommand("").name_for_pods(name) == in_full


def test_the_error_of_a_failed_command_has_its_output(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMAND_VARIABLE, "echo no nodes found for cluster dev: {archive} >&2; exit 1")
    with pytest.raises(ClusterError, match="no nodes found for cluster dev"):
        EXISTING_CLUSTER.load_image(archive)


@pytest.mark.parametrize("line", [None, "", "kind load image-archive"])
def test_a_command_that_takes_no_archive_is_refused_with_an_example(
    line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if line is not None:
        monkeypatch.setenv(COMMAND_VARIABLE, line)
    with pytest.raises(ClusterError, match=r"kind load image-archive \{archive\} --name dev"):
        load_command()


def test_load_says_why_images_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> dict[str, Path]:
        raise ImagesNotBuilt("start a docker daemon")

    monkeypatch.setattr(command, "configured_cluster", lambda: EXISTING_CLUSTER)
    monkeypatch.setattr(command, "build_images", build)
    assert command.main(["load"]) == 1
    assert capsys.readouterr().err == "start a docker daemon\n"
