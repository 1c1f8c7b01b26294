"""Which file systems can keep a journal, told from `/proc/self/mountinfo`."""

from __future__ import annotations

import re
from pathlib import Path

from tinsmith_trainer.errors import VolumeUnsuitable

MOUNTINFO = Path("/proc/self/mountinfo")
UNSUITABLE = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "fuse", "fuseblk"})


def check_file_system(directory: Path, mountinfo: Path = MOUNTINFO) -> None:
    """Raises VolumeUnsuitable. Where the kernel does not list its mounts, nothing is checked."""
    try:
        content = mountinfo.read_text(errors="surrogateescape")
    except OSError:
        return
    kind = file_system_of(directory.resolve(), content)
    if kind is not None and is_unsuitable(kind):
        raise VolumeUnsuitable(
            f"The volume {directory} is on {kind}, where a journal's locks and syncs do not hold what they promise, "
            "and acknowledged work could be lost. Put it on block storage with a file system of its own, or on a "
            "local disk."
        )


def is_unsuitable(kind: str) -> bool:
    return kind in UNSUITABLE or kind.startswith("fuse.")


def file_system_of(directory: Path, mountinfo: str) -> str | None:
    """The type of the file system that a directory is on: that of the deepest mount above it, of several the last."""
    deepest, found = -1, None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        mount_point = Path(_unescaped(fields[4]))
        depth = len(mount_point.parts)
        if directory.is_relative_to(mount_point) and depth >= deepest:
            deepest, found = depth, after.split(" ")[0]
    return found


def _unescaped(text: str) -> str:
    """The kernel writes space, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
