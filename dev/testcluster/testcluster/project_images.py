"""The project's images for a test cluster, built by the same program as `make images`. Unchanged images are kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


class ImagesNotBuilt(Exception):
    """An error whose text says why the images were not built, and what to do."""


def build_images(*names: str) -> dict[str, Path]:
    """Return the archives of these images, or of all of the project's, by name. Raises ImagesNotBuilt.

    A first build takes minutes, an unchanged checkout no time. Progress is printed on standard error.
    """
    finished = subprocess.run(
        [sys.executable, "-m", "images", "build", *names],
        env={**os.environ, "PYTHONPATH": str(ROOT / "dev" / "scripts")},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if finished.returncode != 0:
        raise ImagesNotBuilt("The images could not be built; the lines above say why. `make images` tries it alone.")
    return {name: Path(path) for name, path in json.loads(finished.stdout).items()}
