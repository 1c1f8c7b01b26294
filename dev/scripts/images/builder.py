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
    """A command to run in an image in the same way as in a pod: its user, a read-only root, an empty /tmp and home."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[Path, str] = field(default_factory=dict)
    """Directories of this machine that the command can read, and their mount points below /tmp."""


class Builder(Protocol):
    """docker or buildah. Every method raises ImageError when the program fails."""

    def has_base(self) -> bool: ...

    def pull_base(self) -> None: ...

    def import_base(self, directory: Path) -> None:
        """Import the file system in `directory` as the base image."""

    def build(self, image: Image, tag: str, secrets: Mapping[str, Path], log: Path, stage: str | None = None) -> None:
        """Build the image, or only one stage of it. Layers of earlier builds are used again."""

    def save(self, reference: str, archive: Path) -> None:
        """Write the image to a docker-archive. docker, containerd and podman can import it."""

    def has(self, reference: str) -> bool: ...

    def command(self, reference: str, program: Program) -> list[str]:
        """Return the command on this machine that runs `program` in the image."""

    def prune(self) -> None:
        """Remove the layers that no image or stage with a name uses."""

    def clean(self, references: Sequence[str]) -> None:
        """Remove the named images and all other data that this tool has created."""
