"""The place of a run's temporary files, which the run removes at its end.

A killed process leaves its files, and a machine on which tests run every day fills up. A run names the files that are
left, so that tests that kill processes clean up.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

FOR_TEMPORARY_FILES = "TMPDIR"
FOR_FOLDERS_OF_TESTS = "PYTEST_DEBUG_TEMPROOT"
_OF_WHOLE_RUN = "of-whole-run"
# Multiprocessing and W&B tidy up when the process ends; torch keeps what it compiles for as long as the place is there.
_OF_LIBRARIES = ("pymp-", "torchinductor_")
_ENDS_OF_LIBRARIES = ("wandb-media", "wandb-artifacts")
# Multiprocessing's own folder goes at -100.
_LAST = -1000
LAST_OF_ALL = 2 * _LAST
"""The priority of what ends the process."""


@dataclass(frozen=True)
class OwnPlace:
    """Below the machine's place for temporary files; with a short name, since sockets are made in it."""

    folder: Path
    environment_before: dict[str, str | None]

    @classmethod
    def take(cls) -> OwnPlace:
        """Make `tempfile` use this folder, in this process and its children.

        The folders of single tests are elsewhere: pytest keeps those of the last runs for inspection.
        """
        before = {name: os.environ.get(name) for name in (FOR_TEMPORARY_FILES, FOR_FOLDERS_OF_TESTS)}
        os.environ.setdefault(FOR_FOLDERS_OF_TESTS, tempfile.gettempdir())
        folder = Path(tempfile.mkdtemp(prefix="tin-"))
        # As the machine's own: a database runs under another user.
        folder.chmod(0o1777)
        # After everybody else has tidied up: multiprocessing, too, has files in it until the end.
        Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=_LAST)
        os.environ[FOR_TEMPORARY_FILES] = tempfile.tempdir = str(folder)
        return cls(folder, before)

    def left(self) -> list[str]:
        """Return the names of the files in it, except those of the whole run."""
        names = sorted(entry.name for entry in self.folder.iterdir())
        return [name for name in names if name != _OF_WHOLE_RUN and not _is_of_a_library(name)]

    def give_up(self) -> None:
        """Temporary files are made where they were before; those that are in it go when the process ends."""
        for name, value in self.environment_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = None


def _is_of_a_library(name: str) -> bool:
    return name.startswith(_OF_LIBRARIES) or name.endswith(_ENDS_OF_LIBRARIES)


def folder_of_whole_run(prefix: str) -> Path:
    """Return a new folder that many tests share. It goes when the process ends, or the run of tests."""
    parent = Path(tempfile.gettempdir(), _OF_WHOLE_RUN)
    parent.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
