"""Recipes do not notice which engine trains, nor where its ranks are: over Ray, or in the worker itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.recipes.checks import (
    SAMPLER_IS_TRAINER,
    UNIFORM_AT_FIRST,
    calls,
    checkpoints,
    falls,
    ran,
    starts_near,
    steps,
)
from support.recipes.names import BASE, LLAMA
from support.recipes.program import recipe
from support.recipes.running import Runner
from support.recipes.workshop import models_of
from support.server.serve_process import ServedInstallation

pytestmark = pytest.mark.timeout(900)

STEPS = 6
GROUPS, GROUP_SIZE = 8, 8
SUPERVISED = recipe(
    "recipes.sl_loop",
    [
        steps("train_mean_nll", STEPS),
        starts_near("train_mean_nll", 6.25, 0.35),
        falls("train_mean_nll", by=0.5),
        checkpoints("000005", "final"),
        ran(1 + 2 * STEPS + 3),
    ],
    model_name=BASE,
    batch_size=16,
    max_steps=STEPS,
    max_length=512,
    save_every=5,
    learning_rate=1e-2,
)
# Megatron's logprobs are the builtin sampler's.
REWARD = recipe(
    "recipes.math_rl.train",
    [
        steps("optim/kl_sample_train_v2", STEPS),
        SAMPLER_IS_TRAINER,
        UNIFORM_AT_FIRST,
        calls(asample=STEPS * GROUPS * GROUP_SIZE, optim_step=STEPS),
    ],
    model_name=LLAMA,
    env="arithmetic",
    groups_per_batch=GROUPS,
    group_size=GROUP_SIZE,
    max_tokens=3,
    max_steps=STEPS,
    loss_fn="importance_sampling",
    learning_rate=1e-2,
    eval_every=0,
    save_every=5,
)

ServeOn = Callable[[str, str], Runner]


@pytest.fixture
def serve_on(runner: Runner, tmp_path: Path) -> Iterator[ServeOn]:
    """Start a server of one model, whose worker has ranks as these flags say."""
    with ExitStack() as stack:

        def start(model: str, flags: str) -> Runner:
            settings = {"engine": "nemo-rl", "engine_flags": flags}
            installation = ServedInstallation(tmp_path / "served", models_of(runner.hub, [model]), settings)
            stack.callback(installation.stop)
            return replace(runner, server=installation.start(), scratch=tmp_path)

        yield start


def test_the_supervised_loop_learns_and_saves_on_ranks_of_ray_that_share_matrices(serve_on: ServeOn) -> None:
    SUPERVISED.run(serve_on(BASE, "--ranks 2 --tensor-parallel 2"))


def test_the_reward_loop_trains_on_its_samples_on_a_rank_in_the_worker(serve_on: ServeOn) -> None:
    REWARD.run(serve_on(LLAMA, ""))
