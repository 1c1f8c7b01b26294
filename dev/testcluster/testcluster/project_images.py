"""The images of the project for a test cluster. The images are built by the program that `make images` runs.

Unchanged images are not built again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


class ImagesNotBuilt(Exception):
    """An error for images that were not built. The text of the error says why, and what to do."""


def build_images(*names: str) -> dict[str, Path]:
    """Return the archives of the images in `names`, by name.

    The default of `names` is all images of the project. Raises ImagesNotBuilt.

    A first build takes minutes; without a change of the checkout, a build takes no time. Progress is printed on
    standard error.
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
