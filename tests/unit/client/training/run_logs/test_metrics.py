"""The record of a run, and metrics as plain values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tinsmith.training.run_logs.metrics import METRICS_FILE, REPLACED_FILE, MetricsHistory, numbers_of, plain_metrics

LINES = [
    '{"step": 1, "loss": 3.0}',
    '{"note": "without a step"}',
    '{"step": 2, "loss": 2.0}',
    '{"step": 3, "loss": 1.0}',
]


@pytest.fixture
def history(tmp_path: Path) -> MetricsHistory:
    (tmp_path / METRICS_FILE).write_text("".join(f"{line}\n" for line in LINES))
    return MetricsHistory(tmp_path)


def test_repeated_steps_are_replaced_and_kept_in_another_file(history: MetricsHistory, tmp_path: Path) -> None:
    assert history.last_step() == 3
    history.forget_from(2)
    assert (tmp_path / METRICS_FILE).read_text().splitlines() == LINES[:2]
    assert (tmp_path / REPLACED_FILE).read_text().splitlines() == LINES[2:]
    assert history.last_step() == 1


def test_a_line_that_a_kill_cut_off_goes_even_where_nothing_is_replaced(
    history: MetricsHistory, tmp_path: Path
) -> None:
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "lo')
    history.forget_from(4)
    assert (tmp_path / METRICS_FILE).read_text().splitlines() == LINES
    assert (tmp_path / REPLACED_FILE).read_text() == '{"step": 4, "lo\n'


def test_numbers_of_numpy_become_plain_ones_that_json_knows() -> None:
    given = {"a": np.float32(0.5), "b": np.int64(3), "c": np.array([[2.0]]), "d": np.bool_(True), "e": 1, "f": "word"}
    assert json.loads(json.dumps(plain_metrics(given))) == {"a": 0.5, "b": 3, "c": 2.0, "d": True, "e": 1, "f": "word"}


def test_a_value_that_is_not_a_scalar_becomes_text() -> None:
    assert plain_metrics({"a": [1, 2], "b": None, "c": np.array([1, 2])}) == {"a": "[1, 2]", "b": "None", "c": "[1 2]"}


def test_only_numbers_are_drawn() -> None:
    assert numbers_of({"a": 1, "b": "word", "c": True}) == {"a": 1.0, "c": 1.0}
