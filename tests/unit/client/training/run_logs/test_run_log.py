"""A single call logs to the console, to JSONL and to TensorBoard; a failure is reported and ends no run."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tinsmith.training import run_log
from tinsmith.training.errors import BackendMissing, MetricsLost
from tinsmith.training.run_logs.backends import TensorBoardLogger

pytestmark = pytest.mark.pytorch

PAGE = Path(__file__).parents[5] / "docs" / "how-to" / "training.md"


def recorded(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def drawn(directory: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_the_program_of_the_page_logs_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [source] = [each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "run_log(" in each]
    exec(source, {})
    assert [line["step"] for line in recorded(tmp_path / "run")] == [1, 2, 3]
    assert [step for step, _ in drawn(tmp_path / "run", "train/nll")] == [1, 2, 3]


def test_logged_metrics_are_read_back_with_their_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"learning_rate": 0.5, "place": tmp_path}
    with run_log(tmp_path, config={"learning_rate": 0.5}, to=("console", "jsonl", "tensorboard")) as log:
        log.log_metrics({"loss": np.float32(0.5), "count": torch.tensor(3), "word": "a", "list": [1, 2]}, step=1)
        log.log_metrics({"loss": float("nan")}, step=2)
    first, second = recorded(tmp_path)
    assert first == {"step": 1, "loss": 0.5, "count": 3, "word": "a", "list": "[1, 2]"}
    assert np.isnan(second["loss"])
    assert json.loads((tmp_path / "config.json").read_text()) == {"learning_rate": config["learning_rate"]}
    assert drawn(tmp_path, "loss")[0] == (1, 0.5)
    assert drawn(tmp_path, "count") == [(1, 3.0)]
    assert capsys.readouterr().out.splitlines() == ["step 1  loss 0.5", "step 2  loss nan"]


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """The run is killed after step 4 and resumes from its checkpoint of step 2."""
    for steps, loss in ((range(1, 5), 1.0), (range(3, 7), 0.5)):
        with run_log(tmp_path, to=("jsonl", "tensorboard")) as log:
            for step in steps:
                log.log_metrics({"loss": loss}, step)
    expected = [(1, 1.0), (2, 1.0), (3, 0.5), (4, 0.5), (5, 0.5), (6, 0.5)]
    assert [(line["step"], line["loss"]) for line in recorded(tmp_path)] == expected
    assert drawn(tmp_path, "loss") == expected


def test_late_metrics_of_the_previous_step_replace_none_of_its_metrics(tmp_path: Path) -> None:
    """The late metrics are those of an evaluation that a kill interrupted."""
    with run_log(tmp_path, to=("jsonl", "tensorboard")) as log:
        for step in (1, 2, 3):
            log.log_metrics({"loss": 1.0}, step)
    with run_log(tmp_path, to=("jsonl", "tensorboard")) as log:
        log.begin_at(3)
        log.log_metrics({"eval/loss": 0.5}, 2)
        log.log_metrics({"loss": 0.25}, 3)
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}, {"step": 2, "eval/loss": 0.5}]
    assert recorded(tmp_path) == [*rows, {"step": 3, "loss": 0.25}]
    assert drawn(tmp_path, "loss") == [(1, 1.0), (2, 1.0), (3, 0.25)]
    assert drawn(tmp_path, "eval/loss") == [(2, 0.5)]


def test_a_backend_without_its_package_is_one_sentence_with_its_cure(tmp_path: Path) -> None:
    with pytest.raises(BackendMissing, match=r"logging to trackio needs .*: pip install trackio$"):
        run_log(tmp_path, to=("trackio",))


def test_a_backend_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no backend 'csv'; there are console, jsonl"):
        run_log(tmp_path, to=("csv",))  # type: ignore[arg-type]


def test_a_backend_that_fails_is_reported_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int | None] = []

    def fails(self: TensorBoardLogger, metrics: dict[str, Any], step: int | None = None) -> None:
        asked.append(step)
        raise ConnectionError("no route")

    monkeypatch.setattr(TensorBoardLogger, "log_metrics", fails)
    with caplog.at_level(logging.WARNING), run_log(tmp_path, to=("tensorboard", "jsonl")) as log:
        for step in (1, 2, 3):
            log.log_metrics({"loss": 1.0}, step)
    assert asked == [1, 2, 3]
    assert [line["step"] for line in recorded(tmp_path)] == [1, 2, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "tensorboard fails, and the run continues without it: ConnectionError: no route",
        "tensorboard has failed 3 times in this run",
    ]


def test_a_record_that_cannot_be_written_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    with run_log(tmp_path, to=("jsonl",)) as log:
        log.log_metrics({"loss": 1.0}, 1)
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "metrics.jsonl").mkdir()
        with pytest.raises(MetricsLost, match=r"of step 2 cannot be written to .*metrics.jsonl: .*Is a directory"):
            log.log_metrics({"loss": 1.0}, 2)
