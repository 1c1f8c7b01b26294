"""Estimates by step, and differences where examples can be paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.image
import pytest
from tinsmith.training.errors import EvaluationError
from tinsmith.training.evaluation.comparison import compare, csv_of_comparison, read_runs
from tinsmith.training.evaluation.results import Results, Row, read_rows
from tinsmith.training.evaluation.summary import base_model_at_start, draw_curves, shown, summaries_of

BASE = "Some/Model"


def evaluation(
    directory: Path, by_step: Mapping[int | None, Sequence[float]], fingerprint: str = "f", task: str = "sums"
) -> Path:
    """Write scores of examples 0, 1, …; step None is the base model."""
    with Results(directory, {task: fingerprint}) as results:
        for step, scores in by_step.items():
            path = BASE if step is None else f"tinker://{directory.name}/sampler_weights/{step}"
            label = BASE if step is None else f"step {step}"
            for example, score in enumerate(scores):
                results.add(Row(path, label, step, task, str(example), {"score": score}))
    return directory


def test_an_example_that_was_asked_again_counts_once(tmp_path: Path) -> None:
    rows = [Row("p", "p", 1, "sums", "0", {"score": score}) for score in (0.0, 1.0)]
    [summary] = summaries_of(rows)
    assert (summary.estimate.mean, summary.estimate.examples) == (1.0, 1)


def test_the_same_examples_at_the_same_step_are_paired(tmp_path: Path) -> None:
    first = evaluation(tmp_path / "first", {5: [0, 0, 1, 0], 10: [1, 1, 1, 1]})
    second = evaluation(tmp_path / "second", {5: [1, 0, 1, 1], 20: [1, 1, 1, 1]})
    compared = compare(read_runs([first, second]))
    assert [(one.summary.step, one.run) for one in compared] == [
        (5, "first"),
        (5, "second"),
        (10, "first"),
        (20, "second"),
    ]
    paired = compared[1].difference
    assert paired is not None
    assert (paired.mean, paired.examples) == (0.5, 4)
    assert shown(paired) == "0.5 [-0.419, 1.42]"
    assert (compared[3].difference, compared[3].reason) == (None, "the first run does not have this step")
    assert csv_of_comparison(compared).splitlines()[2].startswith("sums/score,5,second,0.75,")


def test_other_examples_under_the_same_name_are_not_paired(tmp_path: Path) -> None:
    first = evaluation(tmp_path / "first", {5: [0, 1]}, "f1")
    second = evaluation(tmp_path / "second", {5: [0, 1]}, "f2")
    [_, compared] = compare(read_runs([first, second]))
    assert (compared.difference, compared.reason) == (None, "another task: its examples or sampling differ")


def test_runs_in_directories_of_the_same_name_are_distinguished(tmp_path: Path) -> None:
    directories = [evaluation(tmp_path / run / "evaluation", {5: [0, 1]}) for run in ("a", "b")]
    assert list(read_runs(directories)) == [str(directory) for directory in directories]
    with pytest.raises(EvaluationError, match="two directories"):
        read_runs([directories[0], directories[0]])


@pytest.mark.parametrize(
    ("by_step", "more", "at_start"),
    [
        ({None: [0], 5: [1], 10: [1]}, [], True),
        ({None: [0]}, [], False),
        ({5: [1]}, [], False),
        ({None: [0], 0: [0], 5: [1]}, [], False),
        ({None: [0], 5: [1]}, ["Other/Model"], False),
        ({None: [0], 5: [1]}, ["tinker://run/sampler_weights/final"], True),
    ],
    ids=["a run", "alone", "no base model", "step 0 is there", "two base models", "a sampler without a step"],
)
def test_a_base_model_is_where_training_began_if_nothing_else_can_be(
    tmp_path: Path, by_step: dict[int | None, list[float]], more: list[str], at_start: bool
) -> None:
    others = [Row(path, path, None, "sums", "0", {"score": 0.5}) for path in more]
    rows = [*read_rows(evaluation(tmp_path / "a", by_step)), *others]
    start = base_model_at_start(summaries_of(rows))
    assert (start.label if start else None) == (BASE if at_start else None)


def test_a_picture_has_a_panel_for_each_metric_and_a_colour_for_each_run(tmp_path: Path) -> None:
    """The summaries have every form: a base model, steps, no step, and no interval."""
    rows = list(read_rows(evaluation(tmp_path / "a", {None: [0, 1, 0], 5: [0, 1, 1], 10: [1, 1, 1]})))
    rows.append(Row("tinker://a/sampler_weights/5", "step 5", 5, "other", None, {"nll": 0.5, "bpb": 0.2}))
    rows.append(Row("tinker://a/sampler_weights/best", "best", None, "other", None, {"nll": 0.4}))
    rows.append(Row("tinker://a/sampler_weights/best", "best", None, "sums", "0", {"score": 0.5}))
    rows.append(Row("tinker://a/sampler_weights/best", "best", None, "sums", "1", {"score": 0.7}))
    summaries = summaries_of(rows)
    draw_curves({"": summaries}, tmp_path / "one.png")
    draw_curves({"a": summaries, "b": summaries[:3]}, tmp_path / "two.png")
    one, two = (matplotlib.image.imread(tmp_path / name) for name in ("one.png", "two.png"))
    assert one.shape[:2] == two.shape[:2] == (816, 1200)
    orange = [((picture[..., 0] > 0.9) & (picture[..., 2] < 0.2)).any() for picture in (one, two)]
    assert orange == [False, True]
    with pytest.raises(ValueError, match="no results"):
        draw_curves({"": []}, tmp_path / "none.png")
