"""`tinsmith eval`: tables, JSON, exit statuses; tests/sdk covers its requests to a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tinsmith.cli import main
from tinsmith.training.evaluation.results import Results, Row

pytestmark = pytest.mark.pytorch

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["eval", *map(str, words)])
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Create two evaluations of the same examples; the second is better."""
    directories = [tmp_path / "before", tmp_path / "after"]
    for directory, scores in zip(directories, ([0, 0, 1, 0], [1, 0, 1, 1]), strict=True):
        with Results(directory, {"sums": "f"}) as results:
            for example, score in enumerate(scores):
                path = f"tinker://{directory.name}/sampler_weights/5"
                results.add(Row(path, "step 5", 5, "sums", str(example), {"score": score}))
    return directories


def test_runs_are_compared_with_intervals(run: Run, runs: list[Path], tmp_path: Path) -> None:
    status, shown, _ = run("compare", *runs, "--out", tmp_path / "both")
    assert status == 0
    assert shown.splitlines()[2].split() == [
        *("sums/score", "5", "after", "0.75", "[0.301,", "0.954]", "4"),
        *("0.5", "[-0.419,", "1.42]"),
    ]
    assert (tmp_path / "both" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "both" / "comparison.csv").read_text().splitlines()) == 3


def test_a_comparison_is_json_for_scripts(run: Run, runs: list[Path]) -> None:
    compared = json.loads(run("compare", *runs, "--json")[1])
    assert [one["run"] for one in compared] == ["before", "after"]
    assert compared[0]["difference"] is None
    assert compared[1]["difference"]["mean"] == 0.5


def test_a_wrong_line_is_a_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1 + 1"}')
    status, _, said = run(tmp_path / "sums.jsonl", "--model", "Some/Model", "--out", tmp_path / "out")
    assert (status, said) == (1, f"tinsmith eval: {tmp_path}/sums.jsonl:1: answer is missing\n")
    assert not (tmp_path / "out").exists()


def test_help_names_both_commands(run: Run) -> None:
    status, shown, _ = run("--help")
    assert status == 0
    assert "compare" in shown
    assert "run" in shown
