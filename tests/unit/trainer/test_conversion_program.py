"""`python -m tinsmith_trainer.conversion`, as a cluster runs it before a session's ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import structlog
from support.nemo_rl.rank_python import SAVE, SAVE_HALF, conversions_begun, write_rank_python
from support.tiny_models import tiny_directory
from tinsmith_trainer import conversion

TELL_AND_WAIT = """
os.mkfifo(folder + ".go")
print("half way", file=sys.stderr, flush=True)
open(folder + ".go").read()
"""
TELL_AND_STAY = """
print("half way", file=sys.stderr, flush=True)
sys.stdin.read()
sys.exit(1)
"""
WITHOUT_FRAMEWORKS = """
import sys
from pathlib import Path
from tinsmith_trainer import conversion
from tinsmith_trainer.engines.nemo_rl.conversion import converted_model
from tinsmith_trainer.engines.nemo_rl.group import rank_python

conversion._prepare_model = lambda options: converted_model(Path(options.model), "revision", rank_python())
sys.exit(conversion.main())
"""
"""The program, but that it knows the weights' digest: what computes that takes seconds to import."""
ON_GPUS = ("--engine=nemo-rl", "--nodes=1", "--gpus-per-node=4", "--ranks=4", "--tensor-parallel=2")


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "converted"))
    for name, value in write_rank_python(tmp_path / "venvs").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(conversion, "configure_logs", lambda *_: None)
    return tmp_path


def run(*flags: str) -> tuple[int, list[str]]:
    """Run the program; return its status and its log."""
    with structlog.testing.capture_logs() as logs:
        status = conversion.run([f"--model={tiny_directory()}", *flags])
    return status, [str(entry["event"]) for entry in logs]


def start(stack: ExitStack) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WITHOUT_FRAMEWORKS, "--model=/models/base", *ON_GPUS]
    program = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    stack.callback(program.kill)
    return program


def wait_for(program: subprocess.Popen[str], words: str) -> None:
    assert program.stderr is not None
    for line in program.stderr:
        if words in line:
            return
    pytest.fail(f"it ended without a word of {words!r}")


def end(program: subprocess.Popen[str]) -> int:
    program.communicate(timeout=60)
    return program.returncode


def converted(image: Path) -> list[Path]:
    return list((image / "converted").glob("*/tinsmith-whole"))


def test_a_model_is_converted_and_the_next_run_finds_it(image: Path) -> None:
    status, lines = run(*ON_GPUS)
    assert status == 0
    assert lines[0] == "converting the base model to Megatron's format"
    assert len(converted(image)) == 1
    status, lines = run(*ON_GPUS)
    assert (status, lines) == (0, ["the base model is converted to Megatron's format"])
    assert len(conversions_begun(image / "converted")) == 1


@pytest.mark.slow("starts programs that wait for each other")
def test_one_of_two_concurrent_programs_converts_and_the_other_waits(image: Path) -> None:
    write_rank_python(image / "venvs", SAVE_HALF, TELL_AND_WAIT)
    with ExitStack() as stack:
        first = start(stack)
        wait_for(first, "half way")
        second = start(stack)
        wait_for(second, "waiting for another process to convert the base model")
        [go] = (image / "converted").glob("*.go")
        go.write_text("")
        assert (end(first), end(second)) == (0, 0)
    assert len(conversions_begun(image / "converted")) == 1


@pytest.mark.slow("it starts a program that imports PyTorch")
def test_a_program_that_is_stopped_ends_at_once_and_the_next_starts_again(image: Path) -> None:
    write_rank_python(image / "venvs", SAVE_HALF, TELL_AND_STAY)
    with ExitStack() as stack:
        stopped = start(stack)
        wait_for(stopped, "half way")
        stopped.send_signal(signal.SIGTERM)
        assert end(stopped) == 128 + signal.SIGTERM
    assert converted(image) == []
    write_rank_python(image / "venvs", SAVE)
    assert run(*ON_GPUS)[0] == 0
    assert len(conversions_begun(image / "converted")) == 2


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--engine=peft"], "invalid choice: 'peft'"),
        (["--nodes=2", "--gpus-per-node=4", "--ranks=3"], "--ranks 3 does not match"),
        (["--volume=/journal"], "unrecognized arguments: --volume=/journal"),
    ],
)
def test_flags_that_cannot_be_are_refused_in_a_sentence(
    flags: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last_words = tmp_path / "termination-log"
    assert conversion.run(["--model=m", f"--termination-log={last_words}", *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("tinsmith-conversion: ")
    assert sentence in line
    assert sentence in json.loads(last_words.read_text())["message"]


@pytest.mark.usefixtures("image")
def test_a_failure_is_reported_in_the_last_line_and_in_the_termination_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    last_words = tmp_path / "termination-log"
    write_rank_python(Path(os.environ["NEMO_RL_VENV_DIR"]), "print('NCCL WARN'); sys.exit(5)")
    assert run(*ON_GPUS, f"--termination-log={last_words}")[0] == 1
    assert "could not be converted" in capfd.readouterr().err.splitlines()[-1]
    assert "ended with status 5" in json.loads(last_words.read_text())["message"]


@pytest.mark.usefixtures("image")
def test_a_model_that_is_not_there_or_that_ranks_could_not_hold_is_refused_before_it_is_converted(
    tmp_path: Path,
) -> None:
    for flags, reason in (
        ([f"--model={tmp_path}/nowhere", *ON_GPUS], "ModelNotFound"),
        ([*ON_GPUS[:2], "--gpus-per-node=6", "--tensor-parallel=6", "--max-rank=6"], "ModelInvalid"),
    ):
        last_words = tmp_path / "termination-log"
        assert run(*flags, f"--termination-log={last_words}")[0] == 1
        assert json.loads(last_words.read_text())["reason"] == reason
    assert conversions_begun(tmp_path / "converted") == []
