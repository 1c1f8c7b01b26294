"""Runs a tinker-cookbook recipe as its users do, and reads what it wrote: an exit status of 0 proves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.server.serve_process import API_KEY, ServedInstallation

RECIPE_SECONDS = 600
"""Recipes wait for a server without limit, so that a hang must end here."""

LOOK_SECONDS = 20.0

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RecipeRun:
    """What a recipe left: its metrics by step, its checkpoints, and what the server was asked meanwhile."""

    metrics: Sequence[Row]
    checkpoints: Sequence[Row]
    requests: Mapping[str, int]

    def series(self, name: str) -> list[float]:
        """One metric over the steps that report it."""
        return [row[name] for row in self.metrics if name in row]

    def checkpoint(self, name: str) -> Row:
        [found] = [row for row in self.checkpoints if row["name"] == name]
        return found


@dataclass(frozen=True, slots=True)
class RecipeRunner:
    """`hub` is the directory to run in, `scratch` takes logs and caches."""

    server: ServedInstallation
    hub: Path
    scratch: Path

    def run(self, recipe: str, **arguments: object) -> RecipeRun:
        """`python -m tinker_cookbook.recipes.<recipe> name=value …`; fails with the program's last words."""
        log_path = self.scratch / recipe
        flags = [f"{name}={value}" for name, value in {**arguments, "log_path": log_path}.items()]
        before = self._requests()
        done = subprocess.run(
            [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *flags],
            cwd=self.hub,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RECIPE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{recipe} ended with status {done.returncode}:\n{done.stdout[-6000:]}"
        after = self._requests()
        return RecipeRun(
            metrics=_rows(log_path / "metrics.jsonl"),
            checkpoints=_rows(log_path / "checkpoints.jsonl"),
            requests={route: after[route] - before.get(route, 0) for route in after},
        )

    def operations(self, base_model: str, *, at_least: int) -> dict[str, int]:
        """Operations that a model's worker ran since its start, for whatever recipe, by how they ended.

        The server looks at its workers every few seconds: waits for a look that has seen so many.
        """
        deadline = time.monotonic() + LOOK_SECONDS
        while True:
            ended = {
                sample.labels["state"]: int(sample.value)
                for sample in self._samples("tinsmith_futures")
                if sample.labels["base_model"] == base_model and sample.labels["state"] in ("done", "failed")
            }
            if sum(ended.values()) >= at_least or time.monotonic() > deadline:
                return ended
            time.sleep(0.2)

    def stored_checkpoints(self, path: str) -> set[str]:
        """The paths of all checkpoints that the server lists for the training run of `path`."""
        run_id = path.removeprefix("tinker://").partition("/")[0]
        listed = self.server.get(f"/api/v1/training_runs/{run_id}/checkpoints").json()
        return {checkpoint["tinker_path"] for checkpoint in listed["checkpoints"]}

    def _environment(self) -> dict[str, str]:
        """Nothing but the server can be reached, and no cache of another run is seen."""
        # datasets caches local directories by name, not by content.
        cache = self.scratch / "hub-cache"
        return {
            **os.environ,
            "TINKER_BASE_URL": self.server.url,
            "TINKER_API_KEY": API_KEY,
            "TINKER_TELEMETRY": "0",
            "TINKER_COOKBOOK_RUNS_DIR": str(self.scratch / "runs"),
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "",
        }

    def _requests(self) -> dict[str, int]:
        """Requests that the server answered with 200 since its start, by the last part of their route."""
        return {
            sample.labels["route"].rpartition("/")[2]: int(sample.value)
            for sample in self._samples("tinsmith_http_requests_total")
            if sample.labels["status"] == "200"
        }

    def _samples(self, name: str) -> list[Sample]:
        page = self.server.get("/metrics").text
        families = text_string_to_metric_families(page)
        return [sample for family in families for sample in family.samples if sample.name == name]


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
