from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from images import archives
from images.builder import Program
from images.commands import ImageError
from images.sources import Image


class RecordingBuilder:
    """Keeps `Builder`; builds nothing, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.base = True
        self.pullable = True
        self.fails_to_save = False
        self.in_use = False

    def has_base(self) -> bool:
        return self.base

    def pull_base(self) -> None:
        self.calls.append("pull")
        if not self.pullable:
            raise ImageError("no such host")

    def import_base(self, directory: Path) -> None:
        self.calls.append(f"import {(directory / 'etc').read_text()}")

    def build(self, image: Image, tag: str, secrets: Mapping[str, Path], log: Path, stage: str | None = None) -> None:
        assert "build-environment" in secrets
        self.calls.append(f"build {tag} {stage}")

    def save(self, reference: str, archive: Path) -> None:
        archive.write_text(reference)
        if self.fails_to_save:
            raise ImageError("no space left")

    def has(self, reference: str) -> bool:
        return True

    def command(self, reference: str, program: Program) -> list[str]:
        return [reference, *program.words]

    def prune(self) -> None:
        self.calls.append("prune")
        if self.in_use:
            raise ImageError("image is in use by a container")

    def clean(self, references: Sequence[str]) -> None:
        self.calls.append(f"clean {' '.join(references)}")


@pytest.fixture
def image(tmp_path: Path) -> Image:
    root = tmp_path / "checkout"
    root.mkdir()
    (root / ".dockerignore").touch()
    (root / "Dockerfile").write_text("FROM base AS packages\nFROM base\n")
    return Image("example", root / "Dockerfile", root, "1.2")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "images"


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch, cache: Path) -> RecordingBuilder:
    builder = RecordingBuilder()
    monkeypatch.setattr(archives, "find_builder", lambda _cache: builder)
    return builder


def change(image: Image, text: str) -> None:
    (image.root / ".dockerignore").write_text(text)


def built(image: Image) -> Path:
    return archives.build_images([image])["example"].path


def test_an_unchanged_checkout_builds_nothing_and_a_changed_one_another_archive(
    image: Image, builder: RecordingBuilder
) -> None:
    first = built(image)
    builder.calls.clear()
    assert built(image) == first
    assert builder.calls == []
    change(image, "*")
    assert built(image) != first
    assert builder.calls


def test_a_save_that_fails_leaves_no_archive_to_be_taken_for_a_whole_one(
    image: Image, builder: RecordingBuilder, cache: Path
) -> None:
    builder.fails_to_save = True
    with pytest.raises(ImageError, match="no space left"):
        built(image)
    assert list(cache.glob("*.tar")) == []
    builder.fails_to_save = False
    assert built(image).exists()


def test_a_base_that_cannot_be_pulled_is_made_of_debians_packages(
    image: Image, builder: RecordingBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def debootstrap(script: Path, directory: str) -> str:
        assert script.name == "debian-base"
        (Path(directory) / "etc").write_text("debian")
        return ""

    builder.base = builder.pullable = False
    monkeypatch.setattr(archives, "run", debootstrap)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    built(image)
    assert builder.calls[:2] == ["pull", "import debian"]


def test_cleaning_takes_the_archives_and_every_image_and_stage(
    image: Image, builder: RecordingBuilder, cache: Path
) -> None:
    built(image)
    archives.clean_images([image])
    assert list(cache.glob("*.tar")) == []
    assert builder.calls[-1] == f"clean {image.reference} localhost/tinsmith/example-packages:1.2"
