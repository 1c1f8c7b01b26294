"""`tinsmith train` before it contacts a server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from tinsmith.cli import main
from tinsmith.training.runs import opening
from tinsmith.training.runs.commands import heading
from tinsmith.training.runs.config import DpoConfig, RlConfig, RunConfig, SftConfig
from tinsmith.training.runs.objective import RunStart

pytestmark = pytest.mark.pytorch

Run = Callable[..., tuple[int, str, str]]
NO_SERVER = "http://127.0.0.1:9"
"""The address of a port (`discard`) that no server uses."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINKER_BASE_URL", NO_SERVER)
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")

    def run(*words: object) -> tuple[int, str, str]:
        """Return exit status, standard output, standard error."""
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


def test_without_a_server_the_error_names_the_command_that_starts_one(run: Run, tmp_path: Path) -> None:
    assert run("sft", "--example", ".")[0] == 0
    status, shown, said = run("sft", "--config", "run.yaml", "--max-steps", 3)
    assert status == 1
    assert shown == ""
    assert "max_steps: 3\n" in (tmp_path / "sft-run" / "config.yaml").read_text()
    assert "checkpoint" not in said
    assert said.startswith(f"tinsmith train sft: nothing answers at {NO_SERVER}: ")
    assert said.endswith("; run `tinsmith serve --model demo/tiny` to start one on this machine\n")


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


def test_an_interrupted_run_says_what_the_same_command_resumes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is pressed while the command waits for the server's first answer."""

    def press(*_args: object, **_options: object) -> NoReturn:
        raise KeyboardInterrupt

    run("sft", "--example", ".")
    monkeypatch.setattr(opening, "require_server", press)
    words = ("sft", "--config", "run.yaml")
    assert run(*words) == (130, "", "tinsmith train sft: interrupted; no checkpoint was saved\n")
    for step in ("000003", "000012"):
        (tmp_path / "sft-run" / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "sft-run" / "checkpoints" / f"step-{step}" / "metadata.json").touch()
    told = "interrupted; the same command resumes it from the checkpoint of step 12"
    assert run(*words) == (130, "", f"tinsmith train sft: {told}\n")


COUNTED = {"examples": 43, "held_out": 5, "dropped": 0, "truncated": 0}


@pytest.mark.parametrize(
    ("done", "counted", "data", "steps"),
    [
        (0, {}, "43 examples, 5 held out", "129"),
        (60, {"dropped": 2}, "43 examples, 5 held out; 2 dropped for max_length 2048", "129, resumed after step 60"),
        (
            129,
            {"dropped": 1, "truncated": 3},
            "43 examples, 5 held out; 1 dropped and 3 truncated for max_length 2048",
            "129: this run is already finished; another --out begins a new one",
        ),
    ],
    ids=["new", "resumed", "finished"],
)
def test_a_run_begins_with_four_lines(done: int, counted: dict[str, int], data: str, steps: str) -> None:
    config = SftConfig(model="demo/tiny", data=Path("a.jsonl"), out=Path("sft-run"), rank=16, learning_rate=5e-3)
    assert heading(config, RunStart(129, done, COUNTED | counted)) == [
        "model    demo/tiny, rank 16, learning rate 0.005",
        f"data     a.jsonl: {data}",
        f"steps    {steps}",
        "output   sft-run, all settings in sft-run/config.yaml",
    ]


def test_a_run_in_an_environment_counts_groups() -> None:
    config = RlConfig(model="demo/tiny", environment="guessing:environment")
    lines = heading(config, RunStart(30, 0, {"groups": 64, "held_out": 16}))
    assert lines[1] == "data     guessing:environment: 64 groups, 16 held out"
