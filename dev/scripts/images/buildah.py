"""Builds images with buildah. Buildah needs no daemon. The storage of images is in the project's cache."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from images.builder import BASE, Program
from images.commands import ImageError, run, run_logged, succeeds
from images.sources import ROOT, Image

SANDBOX = ROOT / "dev" / "scripts" / "run-in-image"
# The timeout for a registry that cannot be reached is shorter than the one for a slow download.
PULL_SECONDS = 300


class Buildah:
    """Implements `images.builder.Builder`.

    The storage uses overlay mounts if the kernel allows overlay mounts, and full copies (vfs) otherwise.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        # A step in its own namespace would need cgroups, which a container or a small machine may not provide.
        os.environ["BUILDAH_ISOLATION"] = "chroot"

    @staticmethod
    def works() -> bool:
        return shutil.which("buildah") is not None

    def has_base(self) -> bool:
        return self.has(BASE)

    def pull_base(self) -> None:
        self._run("pull", "--quiet", BASE, seconds=PULL_SECONDS)

    def import_base(self, directory: Path) -> None:
        container = self._run("from", "scratch").strip()
        try:
            self._run("add", "--quiet", container, directory, "/")
            self._run("config", "--cmd", "bash", container)
            self._run("commit", "--quiet", container, BASE)
        finally:
            self._run("rm", container)

    def build(self, image: Image, tag: str, secrets: Mapping[str, Path], log: Path, stage: str | None = None) -> None:
        options = [f"--secret=id={name},src={file}" for name, file in secrets.items()]
        if stage is not None:
            options.append(f"--target={stage}")
        command = ["build", "--layers", "--pull-never", *options, f"--file={image.dockerfile}", f"--tag={tag}"]
        run_logged(log, "buildah", *self._places(), *command, image.root)

    def save(self, reference: str, archive: Path) -> None:
        self._run("push", "--quiet", reference, f"docker-archive:{archive}:{reference}")

    def has(self, reference: str) -> bool:
        return succeeds("buildah", *self._places(), "inspect", "--type=image", reference)

    def command(self, reference: str, program: Program) -> list[str]:
        """Return a command.

        The command does not use `buildah run`, because `buildah run` cannot make the root file system read-only.
        """
        if os.geteuid() != 0:
            raise ImageError("Only root can run a program in an image that buildah has built; use sudo, or docker.")
        settings = json.loads(self._run("inspect", "--type=image", reference))["OCIv1"]["config"]
        environment = [*settings["Env"], *(f"{name}={value}" for name, value in program.environment.items())]
        mounts = [f"{source}:{target}" for source, target in program.mounts.items()]
        where = [reference, settings["User"], settings["WorkingDir"], *self._places()]
        words = ["env", "--ignore-environment", *environment, *program.words]
        return [str(SANDBOX), *where, "--", *mounts, "--", *words]

    def prune(self) -> None:
        self._run("rmi", "--prune")

    def clean(self, references: Sequence[str]) -> None:
        """Delete the whole storage. Only this tool uses the storage."""
        self._run("rm", "--all")
        self._run("rmi", "--all", "--force")
        shutil.rmtree(self._directory)

    def _run(self, *words: str | Path, seconds: float | None = None) -> str:
        return run("buildah", *self._places(), *words, seconds=seconds)

    def _places(self) -> list[str]:
        places = [f"--root={self._directory / 'storage'}", f"--runroot={self._directory / 'run'}"]
        # When a root is given, buildah no longer reads this variable by itself.
        driver = os.environ.get("STORAGE_DRIVER")
        return [*places, f"--storage-driver={driver}"] if driver else places
