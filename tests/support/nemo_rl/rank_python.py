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
    """Runs `steps` wherever a model is to be converted. Returns the variable by which it is found."""
    python = venvs / STOCK_WORKER / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text("\n".join([f"#!{sys.executable} -SE", BEGIN, *(steps or (SAVE,))]))
    python.chmod(0o755)
    return {VENVS_VARIABLE: str(venvs)}


def conversions_begun(root: Path) -> list[str]:
    """The folders that were converted into below `root`, one line for each time."""
    begun = root / "begun"
    return begun.read_text().splitlines() if begun.exists() else []
