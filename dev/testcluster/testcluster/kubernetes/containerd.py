"""The containerd of nodes.

This module loads images into containerd without a registry, and sends signals to containers from outside.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from testcluster.errors import ClusterError

_UNPACKED = re.compile(r"^unpacking (?P<name>\S+) \((?P<digest>sha256:[0-9a-f]{64})\)", re.MULTILINE)
_SECONDS = 600.0


@dataclass(frozen=True)
class LoadedImage:
    """An image in the cluster. `name`: repository:tag.

    `digest`: the digest of the image's manifest, or None if the digest is unknown.
    """

    name: str
    digest: str | None = None

    @property
    def pinned(self) -> str:
        """The reference repository@digest.

        A pod that names this reference gets exactly this image, and shows the reference in its status.

        Raises ClusterError if the digest is unknown.
        """
        if self.digest is None:
            raise ClusterError(f"The digest of {self.name} is not known: a command of yours brought it there.")
        return f"{repository(self.name)}@{self.digest}"


def repository(name: str) -> str:
    """Return the name without the tag.

    The colon before the port of a registry is not mistaken for the start of a tag.
    """
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition('@')[0].partition(':')[0]}"


def unpacked(output: str) -> list[LoadedImage]:
    """Return the images that an import reports."""
    return [LoadedImage(found["name"], found["digest"]) for found in _UNPACKED.finditer(output)]


@dataclass(frozen=True)
class Containerd:
    """The containerd of one node. `command`: the command that runs `ctr` for this containerd."""

    command: tuple[str, ...]

    def load(self, archive: Path) -> list[LoadedImage]:
        with archive.open("rb") as contents:
            images = unpacked(self._run("images", "import", "-", stdin=contents.fileno()))
        for image in images:
            self._run("images", "tag", "--force", image.name, image.pinned)
        return images

    def kill(self, container_id: str, number: signal.Signals) -> None:
        """Send a signal to the first process of the container.

        A process inside the container cannot send SIGKILL or SIGSTOP to the container's first process.
        """
        self._run("tasks", "kill", f"--signal={number.name}", container_id)

    def _run(self, *words: str, stdin: int = subprocess.DEVNULL) -> str:
        command = [*self.command, "--namespace=k8s.io", *words]
        finished = subprocess.run(command, stdin=stdin, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if finished.returncode != 0:
            raise ClusterError(f"{' '.join(command)} failed: {finished.stderr.strip()}")
        return finished.stdout


def load(archive: Path, nodes: Iterable[Containerd]) -> list[LoadedImage]:
    """Import an OCI or docker archive into every node. Each image gets its tags, and a name with its digest.

    A pod that pins the digest starts only if the image has a name with the digest. The name with the digest also
    determines `imageID` in the pod's status. Raises ClusterError if the archive names no image.
    """
    loaded: list[LoadedImage] = []
    for node in nodes:
        loaded = node.load(archive)
        if not loaded:
            raise ClusterError(f"{archive} names no image: build it with a tag.")
    return loaded
