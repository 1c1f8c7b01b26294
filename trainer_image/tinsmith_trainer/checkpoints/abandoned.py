"""Removal of saves that never ended: folders without a manifest, where the checkpoint root is a folder.

A save that fails removes its files; a process that is killed cannot. Every worker of a root removes what has not
changed for a day, whoever wrote it: a save under way changes its folder all the time. An object store has no folders,
and a rule of its own for what was not finished (its lifecycle configuration).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

UNCHANGED_SECONDS = 24 * 3600.0
SWEEP_SECONDS = 6 * 3600.0


def keep_sweeping(root: Path, areas: Iterable[str], manifest: str) -> None:
    """From now on, in a thread that no end of the process waits for."""
    wanted = list(areas)

    def sweep() -> None:
        while True:
            try:
                for folder in remove_abandoned(root, wanted, manifest, time.time()):
                    log.info("a save that never ended is removed", folder=str(folder))
            except Exception as error:  # the next sweep may go well
                log.warning("the checkpoint root is not swept", root=str(root), reason=str(error))
            time.sleep(SWEEP_SECONDS)

    threading.Thread(target=sweep, name="root-sweeper", daemon=True).start()


def remove_abandoned(root: Path, areas: Iterable[str], manifest: str, now: float) -> Iterator[Path]:
    """The folders `<area>/<model>/<attempt>` that it has removed. What cannot be removed now is for the next sweep."""
    for area in areas:
        for folder in root.glob(f"{area}/*/*"):
            with contextlib.suppress(OSError):
                if _is_abandoned(folder, manifest, now - UNCHANGED_SECONDS):
                    for path in folder.iterdir():
                        path.unlink(missing_ok=True)
                    folder.rmdir()
                    yield folder


def _is_abandoned(folder: Path, manifest: str, before: float) -> bool:
    """Raises OSError, as where another worker removes it meanwhile."""
    with os.scandir(folder) as found:
        entries = list(found)
    if any(entry.name == manifest or not entry.is_file(follow_symlinks=False) for entry in entries):
        return False
    # Of a copied file the time of its content may be old; that of its name cannot be.
    changes = [folder.stat().st_ctime, *(entry.stat(follow_symlinks=False).st_ctime for entry in entries)]
    return max(changes) < before
