"""Recipes do not notice which engine trains, nor where its ranks are: over Ray, or in the worker itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.client.offline_hub import LLAMA, QWEN, VOCAB_SIZE, OfflineHub
from support.client.recipes import RecipeRunner
from support.server.serve_process import ServedInstallation

pytestmark = pytest.mark.timeout(900)

STEPS = 6
GROUPS, GROUP_SIZE = 8, 8


ServeOn = Callable[[str], RecipeRunner]


@pytest.fixture
def serve_on(hub: OfflineHub, tmp_path: Path) -> Iterator[ServeOn]:
    """A server whose workers have ranks as these flags say."""
    with ExitStack() as stack:

        def start(flags: str) -> RecipeRunner:
            settings = {"engine": "nemo-rl", "engine_flags": flags}
            installation = ServedInstallation(tmp_path / "served", hub.models, settings)
            stack.callback(installation.stop)
            return RecipeRunner(installation.start(), hub.directory, tmp_path)

        yield start


def test_the_supervised_loop_learns_and_saves_on_ranks_of_ray_that_share_matrices(serve_on: ServeOn) -> None:
    recipes = serve_on("--ranks 2 --tensor-parallel 2")
    run = recipes.run(
        "sl_loop", model_name=QWEN, batch_size=16, max_steps=STEPS, max_length=512, save_every=5, learning_rate=1e-2
    )

    losses = run.series("train_mean_nll")
    assert len(losses) == STEPS
    assert 5.9 < losses[0] < 6.6
    assert losses[-1] < losses[0] - 0.5
    assert [checkpoint["name"] for checkpoint in run.checkpoints] == ["000005", "final"]
    expected = 1 + 2 * STEPS + 3
    assert recipes.operations(QWEN, at_least=expected) == {"done": expected, "failed": 0}


def test_the_reward_loop_trains_what_its_sampler_drew_on_a_rank_in_the_worker(serve_on: ServeOn) -> None:
    recipes = serve_on("")
    run = recipes.run(
        "math_rl.train",
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

    gaps = run.series("optim/kl_sample_train_v2")
    assert len(gaps) == STEPS
    assert max(gaps) < 1e-4, "Megatron's logprobs are the builtin sampler's"
    assert run.series("optim/entropy")[0] == pytest.approx(math.log(VOCAB_SIZE), abs=0.25)
    assert run.requests["asample"] == STEPS * GROUPS * GROUP_SIZE
    assert recipes.operations(LLAMA, at_least=2 * STEPS)["failed"] == 0
