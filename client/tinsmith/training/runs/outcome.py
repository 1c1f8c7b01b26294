"""The results of a run: an adapter, curves and a summary."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker
from rich.table import Table

from tinsmith.files import numbered_lines, write_whole
from tinsmith.training.checkpoints.manager import CheckpointManager
from tinsmith.training.checkpoints.store import export_adapter
from tinsmith.training.run_logs.metrics import METRICS_FILE
from tinsmith.training.runs.config import SUMMARY, RunConfig
from tinsmith.training.runs.objective import Panel

ADAPTER, CURVES = "adapter", "curves.png"
COOKBOOK_CONFIG, COOKBOOK_CHECKPOINTS = "config.json", "checkpoints.jsonl"
"""The files of tinker-cookbook's programs. Viewers, such as tinkerscope, find runs by these files."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a finished run. Without held-out examples, the evaluations are empty.

    `state` and `sampler` are paths on the server. Another run can start from `state`; clients can sample from
    `sampler`, or promote `sampler`.
    """

    kind: str
    model: str
    steps: int
    data: Mapping[str, Any]
    before: Mapping[str, float]
    after: Mapping[str, float]
    state: str
    sampler: str
    adapter: str
    curves: str

    def as_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__}, indent=2) + "\n"

    def table(self) -> Table:
        """Return the evaluations as a table."""
        table = Table("", "before", f"after {self.steps} steps", box=None, pad_edge=False)
        for name in self.after:
            table.add_row(
                name.removeprefix("eval/"), f"{self.before.get(name, float('nan')):.4g}", f"{self.after[name]:.4g}"
            )
        return table


def finish(
    config: RunConfig,
    manager: CheckpointManager,
    client: tinker.TrainingClient,
    steps: int,
    data: Mapping[str, Any],
    after: Mapping[str, float],
    panels: Sequence[Panel],
) -> Outcome:
    """Write the results of the last step.

    `client` has the weights after the last step. Earlier results are replaced.
    """
    adapter = config.out / ADAPTER
    shutil.rmtree(adapter, ignore_errors=True)
    export_adapter(manager.store, steps, adapter)
    draw(config.out / METRICS_FILE, panels, config.out / CURVES)
    state = manager.store.metadata(steps).state_path
    outcome = Outcome(
        kind=config.kind,
        model=config.model,
        steps=steps,
        data=data,
        before=evaluation_before(config.out / METRICS_FILE),
        after=dict(after),
        state=state,
        sampler=_sampler(config.out / SUMMARY, state, client, steps),
        adapter=str(adapter),
        curves=str(config.out / CURVES),
    )
    write_whole(config.out / SUMMARY, outcome.as_json())
    _write_cookbook_files(config.out, outcome)
    return outcome


def _write_cookbook_files(out: Path, outcome: Outcome) -> None:
    described = {"model_name": outcome.model, "wandb_name": out.name}
    saved = {"name": "final", "batch": outcome.steps, "state_path": outcome.state, "sampler_path": outcome.sampler}
    write_whole(out / COOKBOOK_CONFIG, json.dumps(described) + "\n")
    write_whole(out / COOKBOOK_CHECKPOINTS, json.dumps(saved) + "\n")


def _sampler(summary: Path, state: str, client: tinker.TrainingClient, steps: int) -> str:
    """Return the path of a saved sampler with the weights of the state.

    A sampler that was saved earlier is reused, because it may be promoted. If no sampler was saved yet, save one.
    """
    if summary.exists():
        earlier = json.loads(summary.read_text())
        if earlier.get("state") == state:
            return str(earlier["sampler"])
    return client.save_weights_for_sampler(f"step-{steps}").result().path


def evaluation_before(metrics_file: Path) -> dict[str, float]:
    """Return the evaluation before the first step. Return an empty result if the user has removed the evaluation."""
    curves = curves_of(metrics_file, None)
    return {name: points[0][1] for name, points in curves.items() if name.startswith("eval/") and points[0][0] == 0}


def curves_of(metrics_file: Path, names: Sequence[str] | None) -> dict[str, list[tuple[int, float]]]:
    """Return the points of the metrics with these names. If `names` is None, return the points of all metrics."""
    points: dict[str, list[tuple[int, float]]] = {}
    for _, line in numbered_lines(metrics_file):
        record = json.loads(line)
        for name in record.keys() - {"step"} if "step" in record else ():
            if names is None or name in names:
                points.setdefault(name, []).append((record["step"], record[name]))
    return points


def draw(metrics_file: Path, panels: Sequence[Panel], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")  # needs no screen
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), layout="constrained", squeeze=False)
    for panel, axis in zip(panels, axes[0], strict=True):
        curves = curves_of(metrics_file, panel.metrics)
        for name in (name for name in panel.metrics if name in curves):
            is_evaluation = name.startswith("eval/")
            label = name.removeprefix("eval/").replace("_", " ")
            axis.plot(
                *zip(*curves[name], strict=True), label=label, marker="o" if is_evaluation else None, linewidth=1.5
            )
        axis.set(title=panel.title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(frameon=False)
    written = file.with_name(f".{file.name}.new")
    figure.savefig(written, dpi=120, format="png")
    plt.close(figure)
    os.replace(written, file)
