"""Environments that are made once, in the project's cache, and used by every checkout.

Each has a name that follows from what it is made of, and only one process makes it. Those that nobody used for a
fortnight go.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from testcluster.places import cache_directory, locked

FIND_UV = Path(__file__).with_name("find-uv")
COMPLETE = "complete"
"""Written last, and touched by each use."""
UNUSED_SECONDS = 14 * 24 * 3600.0


def environment_named_by(kind: str, *made_of: bytes) -> Path:
    """Where that of these inputs is, or will be."""
    inputs = hashlib.sha256(b"".join(made_of)).hexdigest()
    return cache_directory() / kind / inputs[:16]


def is_made(environment: Path) -> bool:
    return (environment / COMPLETE).is_file()


def make_environment(environment: Path, install: Callable[[Path], None]) -> None:
    """Unless it is there. What another process left unfinished is made anew."""
    with locked(environment.with_suffix(".lock")):
        if not is_made(environment):
            shutil.rmtree(environment, ignore_errors=True)
            install(environment)
        (environment / COMPLETE).touch()


def remove_unused(folder: Path, now: float) -> list[Path]:
    """Those whose last use is too long ago, and what an end in the middle left that long ago; says which."""
    unused = [found for found in folder.iterdir() if found.is_dir() and now - _last_use(found) > UNUSED_SECONDS]
    for environment in unused:
        shutil.rmtree(environment)
    return unused


def _last_use(environment: Path) -> float:
    mark = environment / COMPLETE
    return (mark if mark.is_file() else environment).stat().st_mtime


def found_uv() -> str:
    """Its path; it is installed where there is none."""
    return subprocess.run([FIND_UV], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
