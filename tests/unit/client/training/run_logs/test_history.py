"""`metrics.jsonl` has each step once, whatever was killed when."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith.training.run_logs.history import METRICS_FILE, REPLACED_FILE, MetricsHistory

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


def test_steps_that_come_again_are_replaced_and_kept_beside(history: MetricsHistory, tmp_path: Path) -> None:
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
