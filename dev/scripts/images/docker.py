"""Builds of images with a docker daemon."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from images.builder import BASE, Program
from images.commands import ImageError, run, run_logged, succeeds
from images.sources import Image


class Docker:
    """Implements `images.builder.Builder`. The daemon manages the build cache."""

    @staticmethod
    def works() -> bool:
        """Return whether docker can build the images.

        Docker must have BuildKit, because the Dockerfiles mount secrets.
        """
        return succeeds("docker", "info") and succeeds("docker", "buildx", "version")

    def has_base(self) -> bool:
        return self.has(BASE)

    def pull_base(self) -> None:
        run("docker", "pull", "--quiet", BASE, seconds=300)

    def import_base(self, directory: Path) -> None:
        with subprocess.Popen(["tar", "-C", directory, "-c", "."], stdout=subprocess.PIPE) as tar:
            imported = subprocess.run(["docker", "import", "-", BASE], stdin=tar.stdout, check=False)
        if tar.returncode != 0 or imported.returncode != 0:
            raise ImageError(f"docker could not import the base image from {directory}.")

    def build(self, image: Image, tag: str, secrets: Mapping[str, Path], log: Path, stage: str | None = None) -> None:
        options = [f"--secret=id={name},src={file}" for name, file in secrets.items()]
        if stage is not None:
            options.append(f"--target={stage}")
        command = ["docker", "buildx", "build", "--load", "--progress=plain", "--network=host", *options]
        run_logged(log, *command, f"--file={image.dockerfile}", f"--tag={tag}", image.root)

    def save(self, reference: str, archive: Path) -> None:
        run("docker", "save", f"--output={archive}", reference)

    def has(self, reference: str) -> bool:
        return succeeds("docker", "image", "inspect", reference)

    def command(self, reference: str, program: Program) -> list[str]:
        environment = [f"--env={name}={value}" for name, value in program.environment.items()]
        mounts = [f"--volume={source}:{target}:ro" for source, target in program.mounts.items()]
        sandbox = ["--read-only", "--tmpfs=/tmp:mode=1777", "--tmpfs=/home/tinsmith:uid=65532,gid=65532"]
        return ["docker", "run", "--rm", *sandbox, *environment, *mounts, "--entrypoint=", reference, *program.words]

    def prune(self) -> None:
        """Do nothing. The daemon itself limits the build cache, which also contains layers of other projects."""

    def clean(self, references: Sequence[str]) -> None:
        present = [reference for reference in references if self.has(reference)]
        if present:
            run("docker", "image", "rm", *present)
