"""The curves of a run's metrics, and the table and summary of its evaluations."""

from __future__ import annotations

import io
import json
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console
from tinsmith.training.runs.objective import Panel
from tinsmith.training.runs.outcome import Outcome, curves_of, draw, evaluation_before

pytestmark = pytest.mark.pytorch


@pytest.fixture
def metrics_file(tmp_path: Path) -> Path:
    records = [{"step": 0, "eval/held_out/nll": 3.0}, {"note": "no step"}, {"step": 9, "eval/later/nll": 1.0}]
    records += [{"step": step, "train/nll": 3.0 / step, "optim/lr": 0.1} for step in range(1, 20)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def test_a_curve_has_the_logged_points_of_the_requested_metrics(metrics_file: Path) -> None:
    curves = curves_of(metrics_file, ("train/nll", "eval/held_out/nll", "never logged"))
    assert curves.keys() == {"train/nll", "eval/held_out/nll"}
    assert curves["train/nll"] == [(step, 3.0 / step) for step in range(1, 20)]
    assert evaluation_before(metrics_file) == {"eval/held_out/nll": 3.0}


def test_each_panel_of_the_picture_has_a_curve(metrics_file: Path) -> None:
    picture = metrics_file.with_name("curves.png")
    draw(metrics_file, [Panel("nll", ("train/nll", "eval/held_out/nll")), Panel("lr", ("optim/lr",))], picture)
    pixels = matplotlib.image.imread(picture)
    has_blue = (pixels[..., 2] > pixels[..., 0] + 0.2).any(axis=0)
    middle = len(has_blue) // 2
    assert has_blue[:middle].any()
    assert has_blue[middle:].any()
    assert {file.name for file in metrics_file.parent.iterdir()} == {"metrics.jsonl", "curves.png"}


def test_the_table_and_the_summary_have_the_evaluations_before_and_after() -> None:
    before, after = {"eval/held_out/nll": 2.5}, {"eval/held_out/nll": 1.25, "eval/new/nll": 0.5}
    outcome = Outcome("sft", "m", 7, {}, before, after, "tinker://a", "tinker://b", "adapter", "curves.png")
    shown = io.StringIO()
    Console(file=shown, width=80).print(outcome.table())
    assert [line.split() for line in shown.getvalue().splitlines()] == [
        ["before", "after", "7", "steps"],
        ["held_out/nll", "2.5", "1.25"],
        ["new/nll", "nan", "0.5"],
    ]
    summary = json.loads(outcome.as_json())
    assert (summary["steps"], summary["after"], summary["sampler"]) == (7, after, "tinker://b")
