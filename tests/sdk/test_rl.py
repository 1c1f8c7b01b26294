"""Reinforcement learning on the real server: the programs of docs/how-to/training.md, shadows, verifiers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import tinker
from forecaster import best_score, forecasting, questions
from support.client.page_programs import PageProgram, example_program, page_program
from support.client.sdk import adam, exact_logprobs, next_token_datum
from support.requirements import require_environment
from support.server.serve_process import API_KEY, ServedInstallation
from tinsmith.training import MinibatchPlan, RLTrainer, ShadowClient, StepReport, from_functions

MODEL = "tiny/other-name"
FORECASTER = "forecasting("
PROGRAM_OF_VERIFIERS = Path(__file__).parents[1] / "support" / "client" / "verifiers_program.py"


def steps_of(program: PageProgram) -> list[list[float]]:
    """Return what the program prints for each step, the reward first."""
    return [[float(word) for word in said.split()] for _, said in sorted(program.run().values.items())]


def test_the_forecaster_of_the_page_learns_to_report_its_belief(server: ServedInstallation, tmp_path: Path) -> None:
    """The last rewards are clearly nearer to the best forecaster's than the first; single steps vary by chance."""
    steps = steps_of(PageProgram(server, tmp_path / "program", page_program(FORECASTER), MODEL))
    rewards = [reward for [reward] in steps]
    chance, best = mean(rewards[:3]), best_score(questions(seed=1, count=400))
    assert mean(rewards[-10:]) > chance + 0.4 * (best - chance)


def test_the_game_of_the_example_is_played_off_policy_to_its_bound_while_a_shadow_watches(
    server: ServedInstallation, tmp_path: Path
) -> None:
    """The program runs for a third of its steps, because learning would need all of them."""
    source = example_program("shadow_client.py")
    assert '"tiny", 25' in source
    steps = steps_of(PageProgram(server, tmp_path / "program", source.replace('"tiny", 25', '"tiny", 8'), MODEL))
    assert len(steps) == 8
    assert {stale for _, stale, _ in steps} == {0, 1}, "0 is the first step's"
    assert steps[-1][-1] > 0, "the shadow trains meanwhile"


async def trained(client: tinker.ServiceClient, *, shadows: list[ShadowClient]) -> tuple[list[float], list[float]]:
    """Return the losses and gradients of a run, and the logprobs of a sequence under its weights."""
    model = await client.create_lora_training_client(MODEL, rank=8, seed=1)
    numbers: list[float] = []

    async def keep(report: StepReport, _: tinker.SamplingClient) -> None:
        numbers.extend((report.metrics["optim/loss:sum"], report.metrics["optim/grad_norm"]))

    groups = forecasting(questions(seed=2, count=20), group_size=4)
    plan = MinibatchPlan(groups_per_step=4, groups_per_minibatch=2)
    await RLTrainer(model, groups, plan, adam(), max_tokens=2, seed=3, shadows=shadows, on_step=[keep]).run(4)
    probe = await model.forward([next_token_datum([10, 25, 7, 9])], "cross_entropy")
    return numbers, exact_logprobs(probe)[0]


async def test_a_shadow_changes_no_bit_of_the_run_whether_it_trains_or_fails(client: tinker.ServiceClient) -> None:
    alone = await trained(client, shadows=[])
    models = [await client.create_lora_training_client(MODEL, rank=4, seed=2) for _ in range(2)]
    follows = ShadowClient("follows", models[0], adam(), loss_fn="ppo", most_steps_waiting=9)
    fails = ShadowClient("fails", models[1], adam(), loss_fn="cross_entropy", most_steps_waiting=9)
    assert await trained(client, shadows=[follows, fails]) == alone
    assert [step.step for step in follows.steps] == [0, 1, 2, 3]
    assert isinstance(fails.failure, tinker.TinkerError)
    assert (fails.steps, fails.missed_steps) == ([], 4)


async def test_a_prompt_that_is_too_long_costs_its_group(client: tinker.ServiceClient) -> None:
    model = await client.create_lora_training_client(MODEL, rank=4)
    reports: list[StepReport] = []

    async def keep(report: StepReport, _: tinker.SamplingClient) -> None:
        reports.append(report)

    groups = from_functions([3, 5000], lambda length: [7] * length, lambda _, answer: answer[0], group_size=4)
    plan = MinibatchPlan(groups_per_step=2, groups_per_minibatch=2)
    await RLTrainer(model, groups, plan, adam(), max_tokens=1, on_step=[keep]).run(1)
    [report] = reports
    assert len(report.data) == 4
    assert report.metrics["rollout_errors/groups_skipped"] == 1


def test_an_environment_package_of_verifiers_trains_unmodified(server: ServedInstallation) -> None:
    """The package is loaded by its name. verifiers comes from another environment, after this one's packages."""
    packages = require_environment("third-party")
    [site_packages] = packages.glob("lib/python3*/site-packages")
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY}
    command = [sys.executable, str(PROGRAM_OF_VERIFIERS), str(site_packages), MODEL, str(server.models[MODEL])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    steps = [[float(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert [step for step, *_ in steps] == [1, 2, 3]
    assert all(turns == 2 for _, turns, *_ in steps)
    assert all(rewarded == pytest.approx(counted) for _, _, rewarded, counted in steps)
