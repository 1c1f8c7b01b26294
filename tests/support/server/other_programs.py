"""Programs of other projects, run from their checkouts against one server, and what that server counted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tinsmith.local_server import running_server

API_KEY = "tml-dev-key"


def checkout(variable: str, repository: str) -> Path:
    """Return the folder that an environment variable names. The test fails if the variable is not set."""
    folder = os.environ.get(variable)
    if not folder:
        pytest.fail(f"set {variable} to a checkout of {repository}")
    return Path(folder).absolute()


def run_of(checkpoint: str) -> str:
    """Return the training run of a checkpoint's path."""
    return checkpoint.removeprefix("tinker://").partition("/")[0]


@dataclass(frozen=True)
class Installation:
    """A server, and the folder in which the programs run."""

    url: str
    folder: Path

    def run(self, command: Sequence[object], variables: Mapping[str, str]) -> str:
        """Run a program with the variables of the SDK and these variables, and return the program's output."""
        environment = {
            **os.environ,
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": API_KEY,
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **variables,
        }
        done = subprocess.run(
            [*map(str, command)],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def optimizer_steps(self, run_id: str) -> int:
        """Return the number of optimizer steps that the server counted."""
        return len(self._get(f"/{run_id}/metrics")["steps"])

    def checkpoints(self, run_id: str) -> set[str]:
        return {checkpoint["tinker_path"] for checkpoint in self._get(f"/{run_id}/checkpoints")["checkpoints"]}

    def _get(self, path: str) -> dict[str, list[dict[str, Any]]]:
        answer = httpx.get(f"{self.url}/api/v1/training_runs{path}", headers={"X-API-Key": API_KEY})
        found: dict[str, list[dict[str, Any]]] = answer.raise_for_status().json()
        return found


@contextmanager
def installation(folder: Path, model: str) -> Iterator[Installation]:
    """Start a server of the model in the folder. The model's folder has the model's name, which programs load by."""
    arguments = [f"--data={folder}/data", f"--model={model}={folder / model}", "--log-level=warning"]
    with running_server(arguments, API_KEY, folder) as url:
        yield Installation(url, folder)
