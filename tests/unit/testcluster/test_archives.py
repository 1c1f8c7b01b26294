"""Image archives: the same input gives the same image, and a variant is another image with the same layers."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from testcluster.programs.archives import write_archive, write_variant

IMAGE = "tinsmith.local/tinsmith/test-hello:1"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    program = tmp_path / "hello"
    program.write_bytes(bytes(64))
    return write_archive(tmp_path / "hello.tar", IMAGE, program)


def described(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The one entry of an OCI archive's index, and the manifest that it names."""
    with tarfile.open(file) as archive:
        [entry] = json.loads(content(archive, "index.json"))["manifests"]
        return entry, json.loads(content(archive, f"blobs/sha256/{entry['digest'].removeprefix('sha256:')}"))


def content(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    assert member is not None
    return member.read()


def test_a_variant_names_the_layers_of_the_original_and_holds_none(original: Path, tmp_path: Path) -> None:
    variant = write_variant(tmp_path / "variant.tar", "tinsmith.local/tinsmith/other:2", original, "one")
    entry, manifest = described(variant)
    assert entry["annotations"] == {"io.containerd.image.name": "tinsmith.local/tinsmith/other:2"}
    with tarfile.open(original) as archive:
        [settings] = [json.loads(content(archive, name)) for name in archive.getnames() if len(name) == 69]
        size = archive.getmember("layer.tar").size
    [layer] = manifest["layers"]
    assert [layer["digest"]] == settings["rootfs"]["diff_ids"]
    assert layer["size"] == size
    with tarfile.open(variant) as archive:
        assert not [name for name in archive.getnames() if name.endswith(layer["digest"].removeprefix("sha256:"))]


def test_each_mark_has_a_digest_of_its_own(original: Path, tmp_path: Path) -> None:
    marks = ("one", "two", "one")
    files = [write_variant(tmp_path / f"{i}.tar", IMAGE, original, mark) for i, mark in enumerate(marks)]
    digests = [described(file)[0]["digest"] for file in files]
    assert digests[0] == digests[2] != digests[1]
