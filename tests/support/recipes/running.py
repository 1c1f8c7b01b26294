"""Runs a program as its users do, and reads what it wrote: an exit status of 0 proves nothing."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.recipes.python import Python
from support.server.serve_process import API_KEY, ServedInstallation

LOOK_SECONDS = 20.0
ENDED = ("done", "failed")
OPERATIONS = (
    *("create_model", "forward_backward", "forward", "optim_step", "load_weights"),
    *("save_weights", "save_weights_external", "save_weights_for_sampler"),
)
"""Routes of which each request is one operation."""

SHIMS = "bin"
"""Below `scratch`: programs that stand in for others."""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a program: its metrics by step, its checkpoints, and the server's requests meanwhile."""

    metrics: Sequence[Row]
    """The rows of every `metrics.jsonl` below its folder, and the lines of JSON that it printed."""
    checkpoints: Sequence[Row]
    requests: Counter[str]
    """Answered with 200, by the last part of their route."""
    operations: Counter[str]
    """The counts of all workers, by how they ended."""
    stored: frozenset[str]
    """Checkpoints that the server lists for the training runs of `checkpoints`."""
    output: str
    seconds: float

    def series(self, name: str) -> list[float]:
        """One metric over the steps that report it."""
        return [row[name] for row in self.metrics if name in row]

    def paths(self) -> set[str]:
        """Return the paths of its checkpoints, for training and for sampling, without replaced ones."""
        kept = [row for row in self.checkpoints if not row.get("rolling")]
        return {row[kind] for row in kept for kind in ("state_path", "sampler_path") if kind in row}


@dataclass(frozen=True, slots=True)
class Runner:
    """Programs run in `hub`, which holds models and datasets; `scratch` takes logs and caches."""

    server: ServedInstallation
    hub: Path
    scratch: Path
    python: Python

    def folder(self, name: str) -> Path:
        """Return the folder into which the program of that name writes."""
        return self.scratch / name

    def run(self, name: str, command: Sequence[str], typed: str = "") -> Run:
        """`python command…` in the hub's directory; fails with the program's last words."""
        folder = self.folder(name)
        folder.mkdir(parents=True)
        before, ended_before, started = self._requests(), self._ended(), time.monotonic()
        status, output = self.python.run(command, self.hub, environment(self.server, self.scratch, folder), typed)
        seconds = time.monotonic() - started
        assert status == 0, f"{name} ended with status {status}:\n{output[-6000:]}"
        checkpoints = [*_rows(folder, "checkpoints.jsonl")]
        asked = self._requests() - before
        return Run(
            metrics=[*_rows(folder, "metrics.jsonl"), *_printed(output)],
            checkpoints=checkpoints,
            requests=asked,
            operations=self._ended_since(ended_before, sum(asked[route] for route in OPERATIONS)),
            stored=frozenset(self._stored(checkpoints)),
            output=output,
            seconds=seconds,
        )

    def _stored(self, checkpoints: Sequence[Row]) -> Iterator[str]:
        runs = {row["state_path"].removeprefix("tinker://").partition("/")[0] for row in checkpoints}
        for run_id in sorted(runs):
            listed = self.server.get(f"/api/v1/training_runs/{run_id}/checkpoints").json()
            yield from (checkpoint["tinker_path"] for checkpoint in listed["checkpoints"])

    def _ended_since(self, before: Counter[str], accepted: int) -> Counter[str]:
        """Operations that ended since `before`, by how they did.

        The server looks at its workers every few seconds: waits for a look that has seen all that were accepted.
        """
        deadline = time.monotonic() + LOOK_SECONDS
        while (ended := self._ended() - before).total() < accepted and time.monotonic() < deadline:
            time.sleep(0.2)
        return ended

    def _ended(self) -> Counter[str]:
        """Operations of all workers since their start, by how they ended."""
        ended: Counter[str] = Counter()
        for sample in self._samples("tinsmith_futures"):
            if sample.labels["state"] in ENDED:
                ended[sample.labels["state"]] += int(sample.value)
        return ended

    def _requests(self) -> Counter[str]:
        return Counter(
            {
                sample.labels["route"].rpartition("/")[2]: int(sample.value)
                for sample in self._samples("tinsmith_http_requests_total")
                if sample.labels["status"] == "200"
            }
        )

    def _samples(self, name: str) -> list[Sample]:
        page = self.server.get("/metrics").text
        families = text_string_to_metric_families(page)
        return [sample for family in families for sample in family.samples if sample.name == name]


def environment(server: ServedInstallation, scratch: Path, folder: Path) -> dict[str, str]:
    """Return the environment of programs: they reach only the server, and no cache of another run."""
    return {
        **os.environ,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": API_KEY,
        "TINKER_TELEMETRY": "0",
        "OPENAI_BASE_URL": f"{server.url}/oai/api/v1",
        "OPENAI_API_KEY": API_KEY,
        # By which names inspect-ai looks for a service that is none of those it knows.
        "LOCAL_BASE_URL": f"{server.url}/oai/api/v1",
        "LOCAL_API_KEY": API_KEY,
        "TINKER_COOKBOOK_RUNS_DIR": str(folder / "runs"),
        # datasets caches local directories by name, not by content.
        "HF_HOME": str(scratch / "hub-cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "",
        "PATH": os.pathsep.join((str(scratch / SHIMS), str(Path(sys.executable).parent), os.environ["PATH"])),
        # mini-swe-agent keeps its settings there, and knows no price of a model here.
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        # litellm asks for prices at its import otherwise, three times.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _rows(folder: Path, name: str) -> Iterator[Row]:
    for path in sorted(folder.rglob(name)):
        yield from (json.loads(line) for line in path.read_text().splitlines())


def _printed(output: str) -> Iterator[Row]:
    """Lines of JSON: what programs of ours say."""
    yield from (json.loads(line) for line in output.splitlines() if line.startswith('{"') and line.endswith("}"))
