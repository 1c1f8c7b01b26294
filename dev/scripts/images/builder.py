"""The interface of image builders, and the choice of a builder on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from images.sources import Image

BASE = "docker.io/library/debian:trixie-slim"


@dataclass(frozen=True)
class Program:
    """A command that runs in an image as in a pod: with the pod's user, a read-only root, an empty /tmp and home."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[Path, str] = field(default_factory=dict)
    """Directories of this machine that the command can read, with the mount points below /tmp."""


class Builder(Protocol):
    """The interface of docker and buildah. Every method raises ImageError if docker or buildah fails."""

    def has_base(self) -> bool: ...

    def pull_base(self) -> None: ...

    def import_base(self, directory: Path) -> None:
        """Import the file system in `directory` as the base image."""

    def build(self, image: Image, tag: str, secrets: Mapping[str, Path], log: Path, stage: str | None = None) -> None:
        """Build the image, or only one stage of the image. Layers of earlier builds are used again."""

    def save(self, reference: str, archive: Path) -> None:
        """Write the image to a docker-archive. Docker, containerd and podman can import the archive."""

    def has(self, reference: str) -> bool: ...

    def command(self, reference: str, program: Program) -> list[str]:
        """Return the command on this machine that runs `program` in the image."""

    def prune(self) -> None:
        """Remove the layers that no named image and no named stage uses."""

    def clean(self, references: Sequence[str]) -> None:
        """Remove the named images and all other data that this tool has created."""
