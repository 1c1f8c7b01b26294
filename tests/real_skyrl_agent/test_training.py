"""SkyRL-agent's training on Tinker, unmodified: `make test-skyrl-agent SKYRL=… TEVATRON=…` runs it from checkouts.

SkyRL-agent imports all its tools, of which one needs tevatron and one a key of a search engine. The task uses none of
them. The model answers a digit in a box, and the exact match with one of four digits is the reward.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from package_environment import SKYRL_AGENT, environment_directory, lent_libraries
from support.recipes.offline_hub import make_brief_model
from support.server.other_programs import Installation, checkout, installation, run_of

pytestmark = [pytest.mark.skyrl_agent, pytest.mark.timeout(900)]

MODEL = "Qwen/Qwen3-8B"
TASK = Path(__file__).with_name("answers.yaml")
RIGHT = ("6", "7", "8", "9")
STEPS, MORE_STEPS, QUESTIONS, ATTEMPTS = 6, 2, 4, 16
MEAN_REWARD = re.compile(r"'reward/mean': np\.float64\(([0-9.e-]+)\)")
EVALUATED = re.compile(r"'eval/reward/mean/nq': np\.float64\(([0-9.e-]+)\)")
TRAINING = (
    *(f"model_name={MODEL}", f"skyrl_agent_task_yaml={TASK}", "dataset_file=train.parquet"),
    *("eval_dataset_file=test.parquet", f"batch_size={QUESTIONS}", f"group_size={ATTEMPTS}", "learning_rate=5e-3"),
    *(f"save_every={STEPS // 2}", f"eval_every={STEPS}"),
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("skyrl-agent")
    make_brief_model(folder / MODEL)
    write_questions(folder / "train.parquet", 4 * QUESTIONS)
    write_questions(folder / "test.parquet", QUESTIONS)
    with installation(folder, MODEL) as started:
        yield started


def write_questions(path: Path, count: int) -> None:
    rows = [
        {
            "data_source": "nq",
            "prompt": [{"role": "user", "content": f"What is the answer to question {number}?"}],
            "reward_model": {"ground_truth": {"target": RIGHT}},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def train(installed: Installation, *arguments: str) -> str:
    """Run the training, and return its output."""
    skyrl = checkout("SKYRL", "NovaSky-AI/SkyRL")
    tevatron = checkout("TEVATRON", "texttron/tevatron")
    folders = (skyrl / "skyrl-agent", skyrl, skyrl / "skyrl-gym", tevatron / "src")
    python = environment_directory(SKYRL_AGENT) / "bin" / "python"
    return installed.run(
        [python, "-m", "skyrl_agent.integrations.tinker.tinker_train", *TRAINING, *arguments],
        {
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "LD_LIBRARY_PATH": lent_libraries(),
            "HF_HOME": str(installed.folder / "hub-cache"),
            "WANDB_MODE": "offline",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "SKYAGENT_WEB_CACHE_DIR": str(installed.folder / "web-cache"),
            "GOOGLE_SEARCH_KEY": "unused",
        },
    )


def test_reinforcement_learning_raises_the_reward_and_resumes(installed: Installation) -> None:
    said = train(installed, f"max_steps={STEPS}", "wandb_name=digits")
    rewards = [float(reward) for reward in MEAN_REWARD.findall(said)]
    assert len(rewards) == STEPS
    assert statistics.mean(rewards[-2:]) > statistics.mean(rewards[:2]) + 0.1, rewards
    [log] = (installed.folder / "tinker_output").glob("digits_*/checkpoints.jsonl")
    saved = [json.loads(line) for line in log.read_text().splitlines()]
    run_id = run_of(saved[-1]["state_path"])
    assert [row["policy_iteration_step"] for row in saved] == [STEPS // 2, STEPS]
    assert installed.optimizer_steps(run_id) == STEPS
    paths = {row[kind] for row in saved for kind in ("state_path", "sampler_path") if kind in row}
    assert paths <= installed.checkpoints(run_id)

    said_later = train(installed, f"max_steps={STEPS + MORE_STEPS}", f"resume_exp_name={log.parent.name}")
    later = [float(reward) for reward in MEAN_REWARD.findall(said_later)]
    assert len(later) == MORE_STEPS
    assert later[0] > statistics.mean(rewards[:2]) + 0.1, (rewards, later)
    [before, after] = (float(reward) for reward in EVALUATED.findall(said + said_later))
    assert after > before
    resumed_run_id = run_of(json.loads(log.read_text().splitlines()[-1])["state_path"])
    assert resumed_run_id != run_id
    assert installed.optimizer_steps(resumed_run_id) == MORE_STEPS
