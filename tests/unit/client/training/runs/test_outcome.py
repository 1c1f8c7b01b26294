"""Curves of what was logged, and the table of what was evaluated."""

from __future__ import annotations

import io
import json
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console
from tinsmith.training.runs.outcome import Outcome, curves_of, draw
from tinsmith.training.runs.work import Panel

pytestmark = pytest.mark.pytorch


def logged(folder: Path) -> Path:
    file = folder / "metrics.jsonl"
    records = [{"step": 0, "eval/held_out/nll": 3.0}, {"note": "no step"}]
    records += [{"step": step, "train/nll": 3.0 / step, "optim/lr": 0.1} for step in range(1, 20)]
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def test_points_are_those_that_were_logged(tmp_path: Path) -> None:
    curves = curves_of(logged(tmp_path), ("train/nll", "eval/held_out/nll", "never"))
    assert curves.keys() == {"train/nll", "eval/held_out/nll"}
    assert curves["eval/held_out/nll"] == [(0, 3.0)]
    assert curves["train/nll"][:2] == [(1, 3.0), (2, 1.5)]


def test_each_panel_has_ink_in_it(tmp_path: Path) -> None:
    draw(
        logged(tmp_path),
        [Panel("nll", ("train/nll", "eval/held_out/nll")), Panel("lr", ("optim/lr",))],
        tmp_path / "a.png",
    )
    picture = matplotlib.image.imread(tmp_path / "a.png")
    blue = (picture[..., 2] > picture[..., 0] + 0.2).any(axis=0)
    half = len(blue) // 2
    assert blue[:half].any()
    assert blue[half:].any()
    assert [file.name for file in tmp_path.glob(".*")] == []


def test_the_table_has_what_was_evaluated_before_and_after() -> None:
    outcome = Outcome(
        "sft", "m", 7, {}, {"eval/held_out/nll": 2.5}, {"eval/held_out/nll": 1.25}, "tinker://a", "tinker://b", "a", "c"
    )
    shown = io.StringIO()
    Console(file=shown, width=80).print(outcome.table())
    assert [line.split() for line in shown.getvalue().splitlines()] == [
        ["before", "after", "7", "steps"],
        ["held_out/nll", "2.5", "1.25"],
    ]
    assert json.loads(outcome.as_json())["steps"] == 7
