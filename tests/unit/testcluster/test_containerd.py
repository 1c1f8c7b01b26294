"""Images get into a cluster under their tag and under their digest."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from testcluster.errors import ClusterError
from testcluster.kubernetes.containerd import Containerd, LoadedImage, load, repository, unpacked
from testcluster.programs.archives import write_archive

DIGEST = "sha256:" + "ab" * 32
CTR = f"""#!/bin/sh
echo "$@" >> "$CALLS"
case "$3" in import) cat > /dev/null; [ -z "$NAME" ] || echo "unpacking $NAME ({DIGEST})...done" ;; esac
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tinsmith.local/tinsmith/trainer:0.1.0", "tinsmith.local/tinsmith/trainer"),
        ("localhost:5000/trainer:1", "localhost:5000/trainer"),
        ("localhost:5000/trainer", "localhost:5000/trainer"),
        (f"tinsmith.local/tinsmith/trainer@{DIGEST}", "tinsmith.local/tinsmith/trainer"),
        ("pause:1", "pause"),
    ],
)
def test_a_repository_is_the_name_without_its_tag(name: str, expected: str) -> None:
    assert repository(name) == expected


def test_an_import_names_every_image_that_it_brought() -> None:
    output = f"unpacking a/b:1 ({DIGEST})...done\nunpacking c/d:2 ({DIGEST})...\ndone\n"
    assert unpacked(output) == [LoadedImage("a/b:1", DIGEST), LoadedImage("c/d:2", DIGEST)]


@pytest.fixture
def containerd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Containerd:
    program = tmp_path / "ctr"
    program.write_text(CTR)
    program.chmod(0o755)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("NAME", "tinsmith.local/tinsmith/trainer:1")
    return Containerd((str(program),))


def test_every_node_learns_the_digest_too(containerd: Containerd, tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    archive.write_bytes(b"an image")
    [image] = load(archive, [containerd, containerd])
    assert image.pinned == f"tinsmith.local/tinsmith/trainer@{DIGEST}"
    tag = f"--namespace=k8s.io images tag --force tinsmith.local/tinsmith/trainer:1 {image.pinned}"
    assert (tmp_path / "calls").read_text().splitlines().count(tag) == 2


def test_an_archive_without_a_name_is_refused(
    containerd: Containerd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NAME", "")
    archive = tmp_path / "image.tar"
    archive.write_bytes(b"an image")
    with pytest.raises(ClusterError, match="names no image"):
        load(archive, [containerd])


def test_the_same_program_gives_the_same_archive(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_bytes(b"\x7fELF" + bytes(60))
    first = write_archive(tmp_path / "first.tar", "tinsmith/pause:1", program)
    second = write_archive(tmp_path / "second.tar", "tinsmith/pause:1", program)
    assert first.read_bytes() == second.read_bytes()


def test_an_archive_holds_the_program_as_its_entry_point(tmp_path: Path) -> None:
    program = tmp_path / "pause"
    program.write_bytes(b"\x7fELF" + bytes(60))
    with tarfile.open(write_archive(tmp_path / "image.tar", "tinsmith/pause:1", program)) as archive:
        [manifest] = json.load(archive.extractfile("manifest.json") or pytest.fail("no manifest"))
        settings = json.load(archive.extractfile(manifest["Config"]) or pytest.fail("no settings"))
        with tarfile.open(fileobj=archive.extractfile(manifest["Layers"][0])) as layer:
            assert layer.getnames() == ["pause"]
            assert layer.getmember("pause").mode == 0o755
    assert manifest["RepoTags"] == ["tinsmith/pause:1"]
    assert settings["config"]["Entrypoint"] == ["/pause"]
