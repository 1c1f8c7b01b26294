"""The load of images into a cluster that this package did not make. The user provides the load command.

The load command is a shell command, for example `kind load image-archive {archive} --name dev`. `{archive}` is the path
of a docker or OCI archive, and `{image}` is the name of the image in pods. If nodes pull from a registry, the command
pushes the image, and a second variable contains the registry's name in pods.
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
# For a push of the trainer's image, of 1.5 GB, on a slow connection.
_SECONDS = 1800.0


@dataclass(frozen=True)
class LoadCommand:
    """The command that loads images. `registry` is None if images have the same names in pods and in archives."""

    line: str
    registry: str | None = None

    def load(self, archive: Path) -> list[LoadedImage]:
        """Run the command once for each image in the archive.

        Return the images by name. The returned images have no digest.

        Raises ClusterError, with the command's own message, if the command fails. Raises ClusterError also if the
        archive names no image.
        """
        names = [self.name_for_pods(name) for name in image_names(archive)]
        if not names:
            raise ClusterError(f"{archive} names no image: build it with a tag.")
        for name in names:
            run("sh", "-c", self.filled(archive, name), seconds=_SECONDS)
        return [LoadedImage(name) for name in names]

    def filled(self, archive: Path, image: str) -> str:
        """Return the command line for the shell. The inserted values are quoted for the shell."""
        return self.line.replace("{archive}", shlex.quote(str(archive))).replace("{image}", shlex.quote(image))

    def name_for_pods(self, name: str) -> str:
        """Return the full name of the image in docker's form: `team/trainer:1` becomes `docker.io/team/trainer:1`."""
        first, _, rest = name.partition("/")
        if not rest or not (first == "localhost" or "." in first or ":" in first):
            first, rest = "docker.io", name
        return f"{self.registry or first}/{rest}"


def load_command() -> LoadCommand:
    """Return the load command from the environment variables.

    Raises ClusterError with an example if the command has no placeholder for the archive.
    """
    line, registry = os.environ.get(COMMAND_VARIABLE, ""), os.environ.get(REGISTRY_VARIABLE)
    if "{archive}" not in line:
        raise ClusterError(
            f"How images come into the cluster of KUBECONFIG is not known: set {COMMAND_VARIABLE} to a command, "
            "such as 'kind load image-archive {archive} --name dev'."
        )
    return LoadCommand(line, registry.rstrip("/") if registry else None)
