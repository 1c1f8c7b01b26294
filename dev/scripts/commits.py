"""The commit of a run, for the records of runs."""

from __future__ import annotations

import subprocess
from pathlib import Path


class CannotRun(Exception):
    """An error for a run that is impossible on this machine."""


def commit_of(tree: Path, *written: str) -> str:
    """Return the commit of the tree. Changes of files that runs write are ignored.

    Raises CannotRun if the tree has uncommitted changes or no commit, because a record names a commit.
    """
    try:
        changed = _git(tree, "status", "--porcelain", "--", ".", *(f":!{path}" for path in written))
        if changed:
            raise CannotRun(f"a run is of a commit, and this tree has changes: {changed.splitlines()[0].strip()}")
        return _git(tree, "rev-parse", "--short=7", "HEAD")
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotRun(f"which commit is this? Without git it has to be named, by COMMIT= ({error})") from error


def _git(tree: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=tree, check=True, capture_output=True, text=True).stdout.strip()
