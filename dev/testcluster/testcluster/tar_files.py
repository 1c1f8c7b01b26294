"""The unpacking of regular files in an archive.

`TarFile.extractall(filter="data")` is not used, because Debian 12 has Python 3.11.2, and the filter exists since
3.11.4.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath


def extract_files(archive: tarfile.TarFile, directory: Path, name_of: Callable[[str], str | None] = str) -> None:
    """Write each regular file of the archive to `directory`, with the file's permissions.

    Links and devices are left out.

    `name_of` maps a name in the archive to a name in the directory. For None, the file is left out. Raises ValueError
    for a name that points outside the directory.
    """
    for member in archive.getmembers():
        name = name_of(member.name) if member.isfile() else None
        if name is None:
            continue
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"the archive has a file {member.name!r}, which leads out of {directory}")
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        content = archive.extractfile(member)
        assert content is not None, "it is a regular file"
        target.write_bytes(content.read())
        target.chmod(member.mode & 0o755 | 0o200)
