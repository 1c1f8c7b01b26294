"""The folders of a test cluster. Each cluster has a separate folder, and all clusters share a cache of programs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

from testcluster.errors import ClusterError

CACHE_VARIABLE = "TINSMITH_CACHE"
# The longest name with which the paths of a cluster's sockets stay below the 107 bytes of a Unix address.
_NAME = re.compile(r"[a-z][a-z0-9-]{0,19}")


def cache_directory() -> Path:
    """Return the folder of the cache.

    The cache is outside the checkout, so that a fresh clone does not have to build for ten minutes.
    """
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "tinsmith")


def clusters_directory() -> Path:
    """Return the folder of all clusters.

    The clusters of root hold gigabytes of images, which is too much for /run and for a home directory.
    """
    return Path("/var/lib/tinsmith-clusters") if os.geteuid() == 0 else cache_directory() / "clusters"


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock on this file against other processes. At the end, delete the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with file.open("w") as handle:
            flock(handle, LOCK_EX)
            # The earlier holder of the lock has removed this file. Other processes may lock a new file of that name.
            if not _is_still(handle.fileno(), file):
                continue
            try:
                yield
            finally:
                file.unlink()
            return


def _is_still(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class Places:
    """The paths of the folders and files of the cluster `name`."""

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ClusterError(
                f"{self.name!r} is no name for a test cluster: use up to 20 small letters, digits and dashes."
            )

    @property
    def directory(self) -> Path:
        return clusters_directory() / self.name

    @property
    def lock(self) -> Path:
        return clusters_directory() / f"{self.name}.lock"

    @property
    def record(self) -> Path:
        """The path of the cluster's record.

        `up` writes the record last, and `down` removes the record first. If the record exists, the cluster has started
        completely.
        """
        return self.directory / "cluster.json"

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    @property
    def certificates(self) -> Path:
        return self.directory / "certificates"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def processes(self) -> Path:
        return self.directory / "processes"

    @property
    def volumes(self) -> Path:
        return self.directory / "volumes"

    @property
    def policies_socket(self) -> Path:
        return self.directory / "policies.sock"

    def node(self, number: int) -> Path:
        return self.directory / f"node-{number}"
