"""`tinsmith train` on the real server: its examples learn, and a killed run gives the bits of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import yaml
from safetensors.numpy import load_file
from support.server.serve_process import API_KEY, ServedInstallation
from tinsmith.cli import main
from tinsmith.training.checkpoints.store import CheckpointStore

from .conftest import MODEL

LIMIT_SECONDS = 200.0
OF_DATA = ("--save-every", "3", "--eval-every", "4")
OF_GROUPS = ("--groups-per-step", "2", "--group-size", "4", "--eval-groups", "2", "--save-every", "3")
SHORT = {
    "sft": (11, ("--epochs", "2", *OF_DATA)),
    "rl": (8, ("--steps", "8", *OF_GROUPS)),
}
"""The steps of a short run, and its arguments."""
Train = Callable[..., int]


@pytest.fixture
def train(server: ServedInstallation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Train:
    monkeypatch.chdir(tmp_path)
    for name, value in environment_of(server).items():
        monkeypatch.setenv(name, value)

    def train(*words: object) -> int:
        """Return the exit status of `tinsmith train`."""
        with pytest.raises(SystemExit) as end:
            main(["train", *map(str, words)])
        return int(end.value.code or 0)

    return train


def environment_of(server: ServedInstallation) -> dict[str, str]:
    return {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY}


def here(server: ServedInstallation) -> list[str]:
    """Return arguments that replace the demo's model by the server's."""
    return ["--config", "run.yaml", "--model", MODEL, "--tokenizer", str(server.models[MODEL])]


def logged(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def bits(out: Path) -> dict[str, bytes]:
    return {name: each.tobytes() for name, each in load_file(out / "adapter" / "adapter_model.safetensors").items()}


@pytest.mark.parametrize(
    ("kind", "judged_by", "at_most"), [("sft", "eval/held_out/nll", 2.5), ("dpo", "eval/held_out/loss", 0.5)]
)
def test_an_example_learns_and_leaves_the_documented_files(
    train: Train,
    server: ServedInstallation,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    judged_by: str,
    at_most: float,
) -> None:
    assert train(kind, "--example", ".") == 0
    words = ["--epochs", 8, "--logs", "console,tensorboard", "--renderer", "chat_template", "--keep-last", 2]
    assert train(kind, *here(server), *words) == 0
    out = tmp_path / f"{kind}-run"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["after"][judged_by] < at_most < summary["before"][judged_by]
    assert (summary["data"]["examples"], summary["data"]["held_out"]) == (43, 5)
    assert "/sampler_weights/step-43" in summary["sampler"]
    found_by = json.loads((out / "config.json").read_text()) | json.loads((out / "checkpoints.jsonl").read_text())
    assert (found_by["model_name"], found_by["sampler_path"]) == (MODEL, summary["sampler"])
    assert [line["step"] for line in logged(out)] == list(range(44))
    written = yaml.safe_load((out / "config.yaml").read_text())
    assert (written["model"], written["batch_size"], written["renderer"]) == (MODEL, 8, "chat_template")
    assert {file.name for file in (out / "adapter").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert (out / "curves.png").stat().st_size > 10_000
    assert list((out / "tensorboard").iterdir())
    assert CheckpointStore(str(out / "checkpoints")).steps() == [40, 43]
    run_id = summary["sampler"].removeprefix("tinker://").partition("/")[0]
    series = httpx.get(f"{server.url}/api/v1/training_runs/{run_id}/metrics", headers={"X-API-Key": API_KEY}).json()
    assert [one["step"] for one in series["steps"]] == list(range(1, 44))
    assert {one["step"]: one["values"].get(judged_by) for one in series["reported"]}[43] == summary["after"][judged_by]
    shown = capsys.readouterr().out
    model, data, steps, output = shown.splitlines()[2:6]
    assert model.startswith(f"model    {MODEL}, rank 16")
    assert data.endswith(".jsonl: 43 examples, 5 held out")
    assert (steps, output.split(",")[0]) == ("steps    43", f"output   {kind}-run")
    assert "held_out/" in shown.splitlines()[-5]


def test_a_forecaster_learns_from_rewards(train: Train, server: ServedInstallation, tmp_path: Path) -> None:
    assert train("rl", "--example", ".") == 0
    assert train("rl", *here(server), "--steps", 16, "--eval-groups", 8, "--eval-every", 0) == 0
    summary = json.loads((tmp_path / "rl-run" / "summary.json").read_text())
    assert summary["after"]["eval/held_out/reward"] > summary["before"]["eval/held_out/reward"] + 0.05
    assert (summary["steps"], summary["data"]["held_out"]) == (16, 8)
    assert [line["step"] for line in logged(tmp_path / "rl-run")] == [*range(17), 16], "the evaluation after the last"
    assert {file.name for file in (tmp_path / "rl-run" / "adapter").iterdir()} >= {"adapter_model.safetensors"}


GRADED = """
def shortest(said, answer):
    return -float(len(said + answer))
"""


def test_prompts_in_a_file_are_answered_and_graded_by_a_function_of_the_user(
    train: Train, server: ServedInstallation, tmp_path: Path
) -> None:
    (tmp_path / "graded_here.py").write_text(GRADED)
    lines = [json.dumps({"prompt": f"{number} and 1?", "answer": str(number + 1)}) for number in range(6)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    words = ["--model", MODEL, "--tokenizer", server.models[MODEL], "--environment", "jsonl", "--data", "sums.jsonl"]
    words += ["--grader", "graded_here:shortest", "--renderer", "role_colon", "--max-tokens", 4]
    words += ["--steps", 2, "--groups-per-step", 2, "--group-size", 4, "--eval-groups", 2]
    assert train("rl", *words) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["data"]["groups"], summary["data"]["held_out"]) == (4, 2)
    assert summary["after"]["eval/held_out/reward"] < 0


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_run_that_is_stopped_and_killed_at_random_moments_comes_to_the_bits_of_an_undisturbed_one(
    train: Train, server: ServedInstallation, tmp_path: Path, kind: str
) -> None:
    """Ctrl-C stops the run after a save. DPO shares the loop of SFT."""
    train(kind, "--example", ".")
    steps, short = SHORT[kind]
    words = [kind, *here(server), *short, "--out", "disturbed"]
    seed = random.randrange(2**32)
    moments = random.Random(seed)
    stopped = Life(words, server, tmp_path)
    at = stopped.end_after(1, 0, signal.SIGINT)
    assert stopped.status == 130, stopped.output
    assert f"of {steps}, which is saved; the same command resumes from there" in stopped.output
    assert CheckpointStore(str(tmp_path / "disturbed" / "checkpoints")).steps()[-1] >= at
    killed = Life(words, server, tmp_path)
    killed.end_after(moments.randint(1, 4), moments.uniform(0, 0.3), signal.SIGKILL)
    assert killed.status == -signal.SIGKILL, f"seed {seed}: {killed.output}"
    assert train(*words) == 0
    assert train(*words[:-1], "undisturbed") == 0
    assert bits(tmp_path / "disturbed") == bits(tmp_path / "undisturbed"), f"seed {seed}"
    both = [[without_times(line) for line in logged(tmp_path / out)] for out in ("disturbed", "undisturbed")]
    assert both[0] == both[1], f"seed {seed}"
    summaries = [json.loads((tmp_path / out / "summary.json").read_text()) for out in ("disturbed", "undisturbed")]
    assert summaries[0]["after"] == summaries[1]["after"]
    assert summaries[0]["before"] == summaries[1]["before"]


class Life:
    """A process of a run, to its end or to a signal."""

    def __init__(self, words: list[str], server: ServedInstallation, folder: Path) -> None:
        command = [sys.executable, "-m", "tinsmith", "train", *words]
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | environment_of(server),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.output = ""

    @property
    def status(self) -> int:
        return self._process.returncode

    def end_after(self, steps: int, seconds: float, number: signal.Signals) -> int:
        """Send the signal so many seconds after so many steps of this process, and return the last step seen."""
        assert self._process.stdout is not None
        step = 0
        while steps and (line := self._process.stdout.readline()):
            if line.startswith("step ") and "/" in line.split()[1]:
                step = int(line.split()[1].split("/")[0])
                steps -= 1
        time.sleep(seconds)
        self._process.send_signal(number)
        _, self.output = self._process.communicate(timeout=LIMIT_SECONDS)
        return step


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith("time/")}


def test_a_run_at_its_end_is_at_its_end_and_another_run_is_kept_out_of_its_folder(
    train: Train, server: ServedInstallation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("sft", "--example", ".")
    words = ["sft", *here(server), "--max-steps", "2", "--out", "run"]
    assert train(*words) == 0
    first, summary = bits(tmp_path / "run"), (tmp_path / "run" / "summary.json").read_text()
    capsys.readouterr()
    rest = tinker.RestClient(base_url=server.url, api_key=API_KEY)
    newest = rest.list_training_runs().result().training_runs[0]
    assert newest.user_metadata == {"name": "run"}
    assert train(*words) == 0
    assert rest.list_training_runs().result().training_runs[0].training_run_id == newest.training_run_id
    assert "steps    2: this run is already finished; another --out begins a new one" in capsys.readouterr().out
    assert bits(tmp_path / "run") == first
    assert (tmp_path / "run" / "summary.json").read_text() == summary
    assert [line["step"] for line in logged(tmp_path / "run")] == [0, 1, 2]
    capsys.readouterr()
    assert train(*words, "--rank", "4") == 1
    assert "rank was 16 and is 4" in capsys.readouterr().err
    with (tmp_path / "greetings.jsonl").open("a") as data:
        data.write('{"text": "more"}\n')
    assert train(*words) == 1
    assert "the data differs from the data of the run in run" in capsys.readouterr().err
