"""Results after a kill are complete, and belong to one set of tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith.training.errors import ResultsUnfit
from tinsmith.training.evaluation.results import RESULTS_FILE, Results, Row, read_rows


def row(example: str | None, checkpoint: str = "tinker://run/sampler_weights/1") -> Row:
    return Row(checkpoint, "1", 1, "sums", example, {"score": 1.0}, ({"text": "2\n"},))


def written(directory: Path, *examples: str) -> None:
    with Results(directory, {"sums": "f1"}) as results:
        for example in examples:
            results.add(row(example))


def test_added_results_are_read_back(tmp_path: Path) -> None:
    written(tmp_path, "0", "1")
    with Results(tmp_path, {"sums": "f1"}) as results:
        assert results.rows == list(read_rows(tmp_path))
        assert results.done == {row("0").key, row("1").key}


@pytest.mark.parametrize("kept_bytes", [1, 30, -1])
def test_a_line_that_a_kill_cut_off_is_none_and_goes(tmp_path: Path, kept_bytes: int) -> None:
    written(tmp_path, "0", "1")
    path = tmp_path / RESULTS_FILE
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:kept_bytes])
    assert [one.example for one in read_rows(tmp_path)] == ["0"]
    written(tmp_path, "2")
    assert [one.example for one in read_rows(tmp_path)] == ["0", "2"]


def test_other_damage_is_named_by_its_line(tmp_path: Path) -> None:
    written(tmp_path, "0")
    path = tmp_path / RESULTS_FILE
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(ResultsUnfit, match=r"results\.jsonl:1: not the result"):
        list(read_rows(tmp_path))


def test_results_of_another_task_by_the_same_name_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "0")
    with pytest.raises(ResultsUnfit, match="results of another task sums"), Results(tmp_path, {"sums": "f2"}):
        pass
    with Results(tmp_path, {"others": "f2"}) as results:
        assert len(results.rows) == 1


def test_two_sweeps_do_not_write_to_one_directory(tmp_path: Path) -> None:
    with (
        Results(tmp_path, {}),
        pytest.raises(ResultsUnfit, match="another evaluation is writing"),
        Results(tmp_path, {}),
    ):
        pass


def test_a_directory_without_results_says_so(tmp_path: Path) -> None:
    with pytest.raises(ResultsUnfit, match="there are no results"):
        list(read_rows(tmp_path))
