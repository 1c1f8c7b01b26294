"""`tinsmith train` before a server is asked for anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tinsmith.cli import main
from tinsmith.training.runs.config import DpoConfig, RlConfig, RunConfig, SftConfig

pytestmark = pytest.mark.pytorch

Run = Callable[..., tuple[int, str, str]]
NOBODY = "http://127.0.0.1:9"
"""The port of `discard`, at which nobody listens."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_BASE_URL", NOBODY)
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")

    def run(*words: object) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        with pytest.raises(SystemExit) as end:
            main(["train", *map(str, words)])
        shown = capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    return run


@pytest.mark.parametrize("kind", [SftConfig, DpoConfig, RlConfig])
def test_help_tells_every_setting_as_a_flag(run: Run, kind: type[RunConfig]) -> None:
    status, shown, _ = run(kind.kind, "--help")
    assert status == 0
    told = set(re.findall(r"--([a-z0-9-]+)", shown))
    assert told >= {name.replace("_", "-") for name in kind.model_fields} | {"config", "example"}


def test_a_mistake_in_settings_is_a_line(run: Run) -> None:
    status, _, said = run("sft", "--model", "demo/tiny", "--data", "a.jsonl", "--rank", "many")
    assert status == 1
    assert said.startswith("tinsmith train sft: rank is 'many': input should be a valid integer")


def test_bad_lines_are_told_before_a_server_is_asked(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"test": "b"}\n')
    status, _, said = run("sft", "--model", "demo/tiny", "--data", "a.jsonl")
    assert status == 1
    assert said == (
        "tinsmith train sft: a.jsonl:2: neither messages, nor prompt and completion, nor text; it has test\n"
    )
    assert not (tmp_path / "run").exists()


def test_where_no_server_answers_the_command_that_starts_one_is_told(run: Run) -> None:
    assert run("sft", "--example", ".")[0] == 0
    status, shown, said = run("sft", "--config", "run.yaml", "--max-steps", 3)
    assert status == 1
    assert "max_steps: 3\n" in shown
    assert said.startswith(f"tinsmith train sft: nothing answers at {NOBODY}: ")
    assert said.endswith("; `tinsmith serve --model demo/tiny` starts one on this machine\n")


@pytest.mark.parametrize(("kind", "files"), [("sft", 2), ("dpo", 1), ("rl", 0)])
def test_an_example_has_settings_and_data_and_is_not_written_over_others(
    run: Run, tmp_path: Path, kind: str, files: int
) -> None:
    status, shown, _ = run(kind, "--example", "here")
    assert status == 0
    assert f"tinsmith train {kind} --config run.yaml" in shown
    data = [*(tmp_path / "here").glob("*.jsonl")]
    assert len(data) == files
    assert all(json.loads(line) for file in data for line in file.read_text().splitlines())
    status, _, said = run(kind, "--example", "here")
    assert status == 1
    assert "exists already" in said
