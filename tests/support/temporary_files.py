"""A run of the tests has a place of its own for temporary files, which goes at its end.

A process that is killed leaves what it made, and a machine on which tests run every day fills up. What a run leaves it
names, so that whoever kills a process learns to tidy up.
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


@dataclass(frozen=True)
class OwnPlace:
    """Below the machine's place for temporary files; with a short name, since sockets are made in it."""

    folder: Path
    environment_before: dict[str, str | None]

    @classmethod
    def take(cls) -> OwnPlace:
        """From here on `tempfile` makes everything there, in this process and its children.

        Not so the folders of single tests: pytest keeps those of the last runs, to be looked at.
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
        """What is in it now, by name; but for what is there for the whole run."""
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
    """A new folder for what many tests share, wherever they are; it goes when the process ends, or the run of tests."""
    parent = Path(tempfile.gettempdir(), _OF_WHOLE_RUN)
    parent.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
