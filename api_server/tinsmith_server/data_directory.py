"""The server's data directory, made before anything is written there."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tinsmith_server.errors import StartupError


def make_data_directory(data: Path) -> None:
    """Make the directory unless it exists. Raise StartupError if it cannot be made or written."""
    try:
        data.mkdir(parents=True, exist_ok=True)
        # Permissions do not tell what a read-only or special file system refuses, least of all to root.
        with tempfile.TemporaryFile(dir=data):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StartupError(
            f"the data directory {data} cannot be written: {reason}; give --data a directory that can"
        ) from error
