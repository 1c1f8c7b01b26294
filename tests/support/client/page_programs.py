"""Programs of docs/how-to and examples/ as a reader runs them: each in its own process, which a test may kill."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from safetensors.numpy import load_file
from support.server.serve_process import API_KEY, ServedInstallation
from tinsmith.training.checkpoints.store import CheckpointStore

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "docs" / "how-to" / name for name in ("training.md", "evaluation.md", "reinforcement-learning.md")]
ENVIRONMENTS = ROOT / "examples" / "train" / "rl"
"""The modules that programs import. The page says how a reader copies them."""
PLACE_OF_MODEL = '"tiny"'
"""The name of the model in the programs."""
LIMIT_SECONDS = 200.0


def page_program(containing: str, *, of_a_model: bool = True) -> str:
    """Return the source of the one program that contains a text; without `of_a_model` it names no model."""
    programs = [found for page in PAGES for found in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    [source] = [program for program in programs if containing in program]
    assert (PLACE_OF_MODEL in source) == of_a_model
    return str(source)


def example_program(name: str) -> str:
    """Return the source of a program of examples/ that names a model."""
    source = (ROOT / "examples" / name).read_text()
    assert PLACE_OF_MODEL in source
    return source


@dataclass(frozen=True, slots=True)
class Life:
    """A process of the program, to its end or to a kill. `values` has what it printed for each step."""

    killed: bool
    values: dict[int, str]


class PageProgram:
    """A program that runs in `folder`, in which `model` is a relative path, so that the SDK finds the tokenizer."""

    def __init__(self, server: ServedInstallation, folder: Path, source: str, model: str) -> None:
        self.folder = folder
        (folder / model).parent.mkdir(parents=True)
        (folder / model).symlink_to(server.models[model])
        for example in ENVIRONMENTS.glob("*.py"):
            shutil.copy(example, folder)
        (folder / "program.py").write_text(source.replace(PLACE_OF_MODEL, f'"{model}"'))
        self._environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY}

    def run(self, kill_after: tuple[int, float] | None = None) -> Life:
        """Run a process. `kill_after` is a number of its steps, and seconds after the last of them."""
        command = [sys.executable, "program.py"]
        process = subprocess.Popen(
            command, cwd=self.folder, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        values: dict[int, str] = {}
        assert process.stdout is not None
        while line := process.stdout.readline():
            values |= _of_line(line)
            if kill_after is not None and len(values) == kill_after[0]:
                time.sleep(kill_after[1])
                process.kill()
                break
        rest, complaints = process.communicate(timeout=LIMIT_SECONDS)
        for line in rest.splitlines():
            values |= _of_line(line)
        assert process.returncode in (0, -9), complaints
        return Life(process.returncode != 0, values)

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(str(self.folder / "checkpoints"))

    def adapter(self, step: int) -> dict[str, bytes]:
        tensors = load_file(self.folder / "checkpoints" / f"step-{step:06d}" / "adapter.safetensors")
        return {name: tensor.tobytes() for name, tensor in tensors.items()}


def _of_line(line: str) -> dict[int, str]:
    step, _, rest = line.strip().partition(" ")
    return {int(step): rest}
