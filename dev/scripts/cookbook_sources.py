"""The download of tinker-cookbook's own tests.

The wheel of tinker-cookbook does not contain the tests. `make recipes` runs some of these tests.

The tests are in the source distribution of the version in dev/requirements/dev.txt. The download must have the digest
in dev/requirements/dev.txt.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from package_environment import directory_for, found_uv, make_environment
from testcluster.tar_files import extract_files

LOCK = Path(__file__).parents[1] / "requirements" / "dev.txt"
PACKAGE = "tinker-cookbook"
EXTRACTED = ("tests", "pyproject.toml")


def sources_directory(lock: Path = LOCK) -> Path:
    """Return the folder for the sources. The folder may not exist yet."""
    return directory_for(f"{PACKAGE}-sources", lock, locked_version(lock.read_text()))


def locked_version(lock: str) -> str:
    """Return the package's lines in a lock file: the version and the digests."""
    found = re.search(rf"(?ms)^{PACKAGE}==.*?(?=^[a-z0-9]|\Z)", lock)
    assert found, f"the lock has no {PACKAGE}"
    return "".join(f"{line}\n" for line in found[0].splitlines() if not line.lstrip().startswith("#"))


def fetch(directory: Path) -> None:
    """Download the sources. Raises CalledProcessError if the download fails."""
    with tempfile.TemporaryDirectory() as scratch:
        requirement = Path(scratch, "requirement.txt")
        requirement.write_text(locked_version(LOCK.read_text()))
        subprocess.run(download_command(found_uv(), requirement, scratch), check=True)
        [archive] = Path(scratch).glob("*.tar.gz")
        unpack(archive, directory)


def download_command(uv: str, requirement: Path, into: str) -> list[str]:
    """Return a pip command.

    The command uses pip, because uv cannot download a source distribution without installing the package.
    """
    pip = [uv, "run", "--quiet", "--no-project", "--with", "pip", "--python", sys.executable, "python", "-m", "pip"]
    options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--require-hashes", "--dest", into]
    return [*pip, "download", *options, "-r", str(requirement)]


def unpack(archive: Path, directory: Path) -> None:
    """Unpack the wanted files of a source distribution, without its top-level folder."""
    with tarfile.open(archive) as packed:
        extract_files(packed, directory, _name_to_extract)


def _name_to_extract(member: str) -> str | None:
    name = member.partition("/")[2]
    return name if any(name == extracted or name.startswith(f"{extracted}/") for extracted in EXTRACTED) else None


def main(_arguments: Sequence[str]) -> int:
    """Fetch the sources, and return the exit status."""
    directory = sources_directory()
    try:
        make_environment(directory, fetch)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"the sources of {PACKAGE} cannot be fetched: {error}", file=sys.stderr)
        return 1
    print(f"the sources of {PACKAGE} are in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
