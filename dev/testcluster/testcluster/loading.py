"""Images for a cluster that is not ours: its owner names the command that brings them there.

The command is a line of the shell, such as `kind load image-archive {archive} --name dev`. `{archive}` stands for the
path of a docker or OCI archive, `{image}` for the name by which pods will ask for what is in it. Where the nodes pull
from a registry the command is a push, and a second variable says what pods call that registry.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from testcluster.commands import run
from testcluster.errors import ClusterError
from testcluster.kubernetes.containerd import LoadedImage
from testcluster.programs.archives import image_names

COMMAND_VARIABLE = "TINSMITH_TEST_LOAD_IMAGES"
REGISTRY_VARIABLE = "TINSMITH_TEST_REGISTRY"
# A push of the trainer's image, of 1.5 GB, on a slow line.
_SECONDS = 1800.0


@dataclass(frozen=True)
class LoadCommand:
    """`registry` is None where pods ask for images by the names that their archives give them."""

    line: str
    registry: str | None = None

    def load(self, archive: Path) -> list[LoadedImage]:
        """Run the command once for each image in the archive, and return the images by name, without a digest.

        Raises ClusterError when the command fails, in its own words, or when the archive names no image.
        """
        names = [self.name_for_pods(name) for name in image_names(archive)]
        if not names:
            raise ClusterError(f"{archive} names no image: build it with a tag.")
        for name in names:
            run("sh", "-c", self.filled(archive, name), seconds=_SECONDS)
        return [LoadedImage(name) for name in names]

    def filled(self, archive: Path, image: str) -> str:
        """Return the command line for the shell, quoted where needed."""
        return self.line.replace("{archive}", shlex.quote(str(archive))).replace("{image}", shlex.quote(image))

    def name_for_pods(self, name: str) -> str:
        """Return the name in full, as docker writes it: `team/trainer:1` is `docker.io/team/trainer:1`."""
        first, _, rest = name.partition("/")
        if not rest or not (first == "localhost" or "." in first or ":" in first):
            first, rest = "docker.io", name
        return f"{self.registry or first}/{rest}"


def load_command() -> LoadCommand:
    """Return the command that the variables name.

    Raises ClusterError, with an example, when no command takes an archive.
    """
    line, registry = os.environ.get(COMMAND_VARIABLE, ""), os.environ.get(REGISTRY_VARIABLE)
    if "{archive}" not in line:
        raise ClusterError(
            f"How images come into the cluster of KUBECONFIG is not known: set {COMMAND_VARIABLE} to a command, "
            "such as 'kind load image-archive {archive} --name dev'."
        )
    return LoadCommand(line, registry.rstrip("/") if registry else None)
