"""Small files that are whole, or as they were, whatever ends the process or fills the disk."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, content: str | bytes) -> None:
    """Raises OSError, and leaves nothing beside the file."""
    beside = file.with_name(f".{file.name}.new")
    try:
        beside.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(beside, file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
