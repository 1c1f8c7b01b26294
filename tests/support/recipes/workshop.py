"""The place where programs run: the hub's directory, a server with its models, and one warm Python."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.recipes.offline_hub import make_offline_hub
from support.recipes.python import Python
from support.recipes.running import SHIMS, Runner
from support.server.serve_process import ServedInstallation


@contextmanager
def workshop(directory: Path, models: Collection[str]) -> Iterator[Runner]:
    """Start the workshop. The server has the named models of the hub."""
    hub, scratch = directory / "hub", directory / "programs"
    make_offline_hub(hub)
    python = Python()
    installation = ServedInstallation(directory / "served", models_of(hub, models))
    _make_shims(scratch / SHIMS)
    try:
        yield Runner(installation.start(), hub, scratch, python)
    finally:
        python.close()
        installation.stop()


def models_of(hub: Path, names: Collection[str]) -> dict[str, Path]:
    return {name: hub / name for name in sorted(names)}


def _make_shims(directory: Path) -> None:
    """Make shims for the cookbook's tests, which run `uv run python …` and mean this Python."""
    directory.mkdir(parents=True)
    uv = directory / "uv"
    uv.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    uv.chmod(0o700)
