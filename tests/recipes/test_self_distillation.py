"""recipes.sdft.train: a model learns from the likeliest tokens of itself, who has seen the answer."""

from __future__ import annotations

import math

import pytest
from support.client.offline_hub import LLAMA, OfflineHub
from support.client.recipes import RecipeRun, RecipeRunner

pytestmark = pytest.mark.timeout(700)

STEPS = 3
GROUPS = 4
TOP_K = 4
SYNCED_AFTER = 2
DEMONSTRATIONS = "toolalpaca"


@pytest.fixture(scope="module")
def run(hub: OfflineHub, recipes: RecipeRunner) -> RecipeRun:
    rows = [{"prompt": f"What is {number} and one?", "golden_response": [f"{number + 1}"]} for number in range(20)]
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(hub.directory / DEMONSTRATIONS)
    return recipes.run(
        "sdft.train",
        # Not QWEN, whose operations the supervised loop counts.
        model_name=LLAMA,
        dataset="toolalpaca",
        toolalpaca_data_path=DEMONSTRATIONS,
        topk=TOP_K,
        groups_per_batch=GROUPS,
        max_tokens=16,
        max_steps=STEPS,
        teacher_sync_every=SYNCED_AFTER,
        learning_rate=1e-2,
        eval_every=0,
        lora_rank=8,
    )


def test_the_teacher_says_more_than_one_likely_token_at_each_position(run: RecipeRun) -> None:
    """Without top-k logprobs the recipe would learn from nothing, and say 0."""
    entropies = run.series("sdft/mean_teacher_entropy")

    assert len(entropies) == STEPS
    assert all(0.1 < entropy < math.log(TOP_K) for entropy in entropies)


def test_several_targets_per_position_give_a_gradient(run: RecipeRun) -> None:
    norms = run.series("grad_norm")

    assert len(norms) == STEPS
    assert all(0 < norm < math.inf for norm in norms)


def test_each_group_is_sampled_by_the_student_and_scored_by_the_teacher(run: RecipeRun) -> None:
    asked = ("asample", "forward_backward", "optim_step")

    assert [run.requests[name] for name in asked] == [2 * GROUPS * STEPS, STEPS, STEPS]


def test_the_teacher_takes_up_what_the_student_has_learnt(run: RecipeRun) -> None:
    """For the synced teacher, the recipe names the saved weights and their base model."""
    assert run.requests["create_sampling_session"] == 1 + STEPS // SYNCED_AFTER
