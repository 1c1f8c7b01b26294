"""The server's data directory, made before anything is written there, for the server's own user alone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tinsmith_server.errors import StartupError

PRIVATE_UMASK = 0o077
PRIVATE_DIRECTORY = 0o700


def keep_files_private() -> None:
    """Make files of this process and its workers readable for their own user alone.

    Journals and checkpoints hold the training data of all tenants, and other users of this machine are no tenants.
    """
    os.umask(PRIVATE_UMASK)


def make_data_directory(data: Path) -> None:
    """Make the directory unless it exists. Raise StartupError if it cannot be made or written."""
    try:
        data.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        # Permissions do not tell what a read-only or special file system refuses, least of all to root.
        with tempfile.TemporaryFile(dir=data):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StartupError(
            f"the data directory {data} cannot be written: {reason}; give --data a directory that can"
        ) from error
