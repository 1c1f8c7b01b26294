"""rLLM's commands for training, unmodified: `make test-rllm RLLM=…` runs them from a checkout.

The commands get the server's URL and key from the variables of the SDK. The only other setting is a free port of this
machine for rLLM's own gateway, between the agent and the trainer.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_environment import RLLM, environment_directory
from support.server.other_programs import Installation, checkout, installation, run_of
from tinsmith.local_server import free_port
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model

pytestmark = [pytest.mark.rllm, pytest.mark.timeout(900)]

# rLLM chooses the chat format by the name of the model.
MODEL = "Qwen/Qwen3-8B"
STEPS = 8
MEAN_REWARD = re.compile(r"^step:(\d+) .*reward/letters/mean:np\.float64\(([0-9.e-]+)\)", re.MULTILINE)
MEAN_NLL = re.compile(r"train_mean_nll:([0-9.]+)")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("rllm")
    make_tiny_model(folder / MODEL)
    with installation(folder, MODEL) as started:
        yield started


def rllm(place: Installation, *arguments: object) -> str:
    """Run a command of rLLM, and return its output."""
    source = checkout("RLLM", "rllm-org/rllm")
    environment = str(environment_directory(RLLM))
    packages = sysconfig.get_path("purelib", vars={"base": environment, "platbase": environment})
    folders = (packages, source, source / "rllm-model-gateway" / "src", Path(__file__).parent)
    variables = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "RLLM_HOME": str(place.folder / "home")}
    return place.run([sys.executable, "-m", "rllm.cli.main", *arguments], variables)


def last_checkpoint(output: Path) -> dict[str, str]:
    """Return the record of the checkpoint from which rLLM would resume."""
    step = (output / "latest_checkpointed_iteration.txt").read_text()
    record: dict[str, str] = json.loads((output / f"global_step_{step}" / "checkpoint.json").read_text())
    return record


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_supervised_training_lowers_the_loss_and_saves_checkpoints(place: Installation) -> None:
    sums = [(first, second) for first in range(8) for second in range(8)]
    conversations: list[dict[str, object]] = [
        {
            "messages": [
                {"role": "user", "content": f"{first} + {second}?"},
                {"role": "assistant", "content": str(first + second)},
            ]
        }
        for first, second in sums
    ]
    file, output = write_rows(place.folder / "sums.jsonl", conversations), place.folder / "supervised"
    said = rllm(
        place,
        *("sft", "--train-file", file, "--model", MODEL, "--output", output),
        *("--lr", 0.003, "--batch-size", len(sums) // STEPS, "--save-freq", STEPS // 2),
    )
    losses = [float(loss) for loss in MEAN_NLL.findall(said)]
    saved = [json.loads(line) for line in (output / "checkpoints.jsonl").read_text().splitlines()]
    run_id = run_of(saved[-1]["state_path"])
    assert len(losses) == place.optimizer_steps(run_id) == STEPS
    assert losses[-1] < losses[0] - 0.5
    assert place.checkpoints(run_id) == {row[kind] for row in saved for kind in ("state_path", "sampler_path")}


def test_reinforcement_learning_raises_the_reward_and_resumes(place: Installation) -> None:
    tasks: list[dict[str, object]] = [{"question": f"Write about {number}."} for number in range(2 * STEPS)]
    rllm(
        place,
        *("dataset", "register", "letters", "--split", "train"),
        *("--file", write_rows(place.folder / "tasks.jsonl", tasks)),
    )
    gateway = place.folder / "gateway.yaml"
    gateway.write_text(json.dumps({"rllm": {"gateway": {"host": "127.0.0.1", "port": free_port(0)}}}))
    output = place.folder / "reinforced"
    train = (
        *("train", "letters", "--agent", "rllm_letters:agent", "--evaluator", "rllm_letters:share_of_letters"),
        *("--model", MODEL, "--lr", 0.01, "--batch-size", 2, "--group-size", 16, "--max-tokens", 8),
        *("--save-freq", STEPS // 2, "--config", gateway, "--output", output),
    )
    rewards = {int(step): float(reward) for step, reward in MEAN_REWARD.findall(rllm(place, *train))}
    assert sorted(rewards) == [*range(1, STEPS + 1)]
    means = [rewards[step] for step in sorted(rewards)]
    assert statistics.mean(means[-2:]) > statistics.mean(means[:2]), means
    last = last_checkpoint(output)
    run_id = run_of(last["state_path"])
    assert place.optimizer_steps(run_id) == STEPS
    assert {last["state_path"], last["sampler_path"]} <= place.checkpoints(run_id)

    later = {int(step): float(reward) for step, reward in MEAN_REWARD.findall(rllm(place, *train, "--epochs", 2))}
    assert len(later) == STEPS
    assert min(later) > STEPS
    assert later[min(later)] > means[0], (means, later)
    resumed_run_id = run_of(last_checkpoint(output)["state_path"])
    assert resumed_run_id != run_id
    assert place.optimizer_steps(resumed_run_id) == STEPS
