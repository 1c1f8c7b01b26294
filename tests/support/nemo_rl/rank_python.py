"""A program in the place of the ranks' interpreter, which the image of NeMo RL has and this machine has not."""

from __future__ import annotations

import sys
from pathlib import Path

from tinsmith_trainer.engines.nemo_rl.group import STOCK_WORKER, VENVS_VARIABLE

BEGIN = """
import os, sys
from pathlib import Path
_, module, directory, folder = sys.argv[1:]
with Path(folder).with_name("begun").open("a") as begun:
    begun.write(f"{folder}\\n")
"""
SAVE = """
iteration = Path(folder, "iter_0000000")
iteration.mkdir()
iteration.joinpath("run_config.yaml").write_text("model: {}")
iteration.joinpath("__0_0.distcp").write_bytes(bytes(1000))
"""
SAVE_HALF = """
Path(folder, "iter_0000000").mkdir()
Path(folder, "iter_0000000", "run_config.yaml").touch()
"""


def write_rank_python(venvs: Path, *steps: str) -> dict[str, str]:
    """Write a Python that runs `steps` instead of a conversion, and return the variable that names it."""
    python = venvs / STOCK_WORKER / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text("\n".join([f"#!{sys.executable} -SE", BEGIN, *(steps or (SAVE,))]))
    python.chmod(0o755)
    return {VENVS_VARIABLE: str(venvs)}


def conversions_begun(root: Path) -> list[str]:
    """Return the folders below `root` into which a model was converted, one for each time."""
    begun = root / "begun"
    return begun.read_text().splitlines() if begun.exists() else []
