"""The images, and the files that each image contains. The Dockerfile of an image names the image's files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[3]
IGNORED = "__pycache__"
LOCAL_REGISTRY = "tinsmith.local"
"""The registry in the names of images.

The name of the registry is not in public DNS, so a node without the image cannot pull a foreign image with the same
name.
"""


def version() -> str:
    """Return the project's version, which is also the tag of the images."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None, "pyproject.toml names no version"
    return found[1]


@dataclass(frozen=True)
class Image:
    """An image of the project."""

    name: str
    dockerfile: Path
    root: Path = ROOT
    tag: str = field(default_factory=version)

    @property
    def reference(self) -> str:
        """Return the name that pods use for the image."""
        return f"{LOCAL_REGISTRY}/tinsmith/{self.name}:{self.tag}"

    @cached_property
    def instructions(self) -> list[list[str]]:
        """Return the instructions in the Dockerfile as lists of words.

        Continued lines are joined, and comments are left out.
        """
        text = re.sub(r"^\s*#.*\n", "", self.dockerfile.read_text(), flags=re.MULTILINE)
        return [line.split() for line in text.replace("\\\n", " ").splitlines() if line.strip()]

    @property
    def stages(self) -> list[str]:
        """Return the names of the named stages, in order."""
        return [words[3] for words in self.instructions if words[0] == "FROM" and "AS" in words]

    def stage_tag(self, stage: str) -> str:
        """Return the name that the builder gives to a stage."""
        return f"localhost/tinsmith/{self.name}-{stage}:{self.tag}"

    def copied(self) -> Iterator[Path]:
        """Yield every file in the checkout that the build copies."""
        for words in self.instructions:
            if words[0] == "COPY" and not words[1].startswith("--from"):
                for source in words[1:-1]:
                    yield from _files(self.root / source)

    def digest(self) -> str:
        """Return a hash of the image's name and of every file that the build copies.

        The hash does not include Debian's packages.
        """
        digest = hashlib.sha256(self.reference.encode())
        for file in [self.dockerfile, self.root / ".dockerignore", *self.copied()]:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(self.root)}\0{content}\n".encode())
        return digest.hexdigest()[:16]


def _files(path: Path) -> list[Path]:
    """Return the files below the path. Raises FileNotFoundError if no files exist."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file() and IGNORED not in file.parts)
    return [path]


IMAGES = {
    "trainer": Image("trainer", ROOT / "trainer_image" / "Dockerfile.cpu"),
    "api-server": Image("api-server", ROOT / "api_server" / "Dockerfile"),
    "operator": Image("operator", ROOT / "operator" / "Dockerfile"),
}
OPTIONAL_IMAGES = {
    "test-services": Image("test-services", ROOT / "tests" / "support" / "in_cluster" / "Dockerfile"),
    "trainer-megatron": Image("trainer-megatron", ROOT / "trainer_image" / "Dockerfile.cpu-megatron"),
}
"""Services that tests install next to Tinsmith, and the CPU worker of nemo-rl and miles.

Images of test services and CPU workers are built only on request.
"""
GPU_IMAGES = {
    name: Image(name, ROOT / "trainer_image" / dockerfile)
    for name, dockerfile in (
        ("trainer-nemo-rl", "Dockerfile.nemo-rl"),
        ("trainer-miles", "Dockerfile.miles"),
        ("trainer-gpu", "Dockerfile.gpu"),
    )
}
"""Images for GPUs. The base images of GPU images have tens of gigabytes.

These tools do not build GPU images; users build GPU images with `docker build`.
"""
