"""SQLite stores at the newest revision, copied from a file that each test process migrates once."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from tinsmith_server.store.connection import parse_store_url
from tinsmith_server.store.migrate import migrate

_SQLITE = "sqlite:///"


def with_schema(url: str) -> str:
    """Return `url`, after an absent SQLite file got the schema, which takes twenty times as long by migration.

    A PostgreSQL database, and a file in a directory that is yet to be made, are left to the server's own migration.
    """
    file = Path(url.removeprefix(_SQLITE))
    if url.startswith(_SQLITE) and file.parent.is_dir() and not file.exists():
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
            copy.write(_migrated())
    return url


@cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "store.db"
        migrate(parse_store_url(f"{_SQLITE}{file}"))
        return file.read_bytes()
