"""Folders that a command writes its results to."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer


def make_output_folder(folder: Path, option: str) -> None:
    """Make the folder unless it exists. Raise typer.BadParameter, which names the option, if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be written: {error.strerror}", param_hint=option) from error
