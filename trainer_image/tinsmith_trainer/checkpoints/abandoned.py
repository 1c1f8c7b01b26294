"""Removal of the folders that unfinished saves left in a checkpoint root.

An unfinished save has no manifest. A save that fails removes the written files, but a killed process leaves files
behind. Every worker removes folders of the checkpoint root that have not changed for a day, including folders of other
workers. A folder changes all the time while a save writes to it. An object store has no folders; unfinished uploads are
removed by a rule in the store's lifecycle configuration.
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


def start_sweeping(root: Path, areas: Iterable[str], manifest: str) -> None:
    """Start a daemon thread that sweeps periodically."""
    area_names = list(areas)

    def sweep() -> None:
        while True:
            try:
                for folder in remove_abandoned(root, area_names, manifest, time.time()):
                    log.info("removed an unfinished save", folder=str(folder))
            except Exception as error:  # the next sweep may succeed
                log.warning("cannot sweep the checkpoint root", root=str(root), reason=str(error))
            time.sleep(SWEEP_SECONDS)

    threading.Thread(target=sweep, name="root-sweeper", daemon=True).start()


def remove_abandoned(root: Path, areas: Iterable[str], manifest: str, now: float) -> Iterator[Path]:
    """Remove abandoned folders `<area>/<model>/<attempt>`, and yield them.

    A folder that cannot be removed stays until the next sweep.
    """
    for area in areas:
        for folder in root.glob(f"{area}/*/*"):
            with contextlib.suppress(OSError):
                if _is_abandoned(folder, manifest, now - UNCHANGED_SECONDS):
                    for path in folder.iterdir():
                        path.unlink(missing_ok=True)
                    folder.rmdir()
                    yield folder


def _is_abandoned(folder: Path, manifest: str, before: float) -> bool:
    """Return whether a folder is abandoned. Raises OSError, for example if another worker removes the folder."""
    with os.scandir(folder) as found:
        entries = list(found)
    if any(entry.name == manifest or not entry.is_file(follow_symlinks=False) for entry in entries):
        return False
    # A copied file may keep an old mtime, but not an old ctime.
    changes = [folder.stat().st_ctime, *(entry.stat(follow_symlinks=False).st_ctime for entry in entries)]
    return max(changes) < before
