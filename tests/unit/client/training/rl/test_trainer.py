"""A run's reaction to failed environments, equal rewards and lost servers; without a server."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest
import tinker
from support.client.simulated_training import SimulatedModel, SimulatedSampler
from tinker import types
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.utils.ml_log import Logger
from tinsmith.training.checkpoints.manager import Resumed
from tinsmith.training.environments.functions import from_functions
from tinsmith.training.errors import NothingToTrainOn, ShadowCutOff
from tinsmith.training.rl.shadow import ShadowClient
from tinsmith.training.rl.trainer import RLTrainer
from tinsmith.training.streams import MinibatchPlan, StepReport

pytestmark = pytest.mark.pytorch

ADAM = types.AdamParams(learning_rate=1e-3)
PLAN = MinibatchPlan(groups_per_step=2, groups_per_minibatch=1)


class Log(Logger):
    def __init__(self) -> None:
        self.lines: list[tuple[int | None, dict[str, Any]]] = []

    def log_hparams(self, config: Any) -> None:
        raise NotImplementedError

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.lines.append((step, metrics))


class Manager:
    """A manager with the interface of CheckpointManager."""

    def __init__(self, save_every: int) -> None:
        self.saved: list[Any] = []
        self._save_every = save_every

    def maybe_save(self, model: Any, step: int, **state: Any) -> bool:
        if step % self._save_every:
            return False
        self.save(model, step, **state)
        return True

    def save(self, model: Any, step: int, *, loop_state: Any, metrics: Any) -> None:
        self.saved.append(Resumed(step, model, loop_state, metrics, ()))


def numbers_of(model: SimulatedModel) -> list[Any]:
    """Return everything that the model was trained on."""
    return [
        (datum.model_input.to_ints(), {name: [*tensor.data] for name, tensor in datum.loss_fn_inputs.items()})
        for data in model.trained
        for datum in data
    ]


def drawn(prompt: list[int], seed: int | None) -> list[int]:
    return [random.Random(seed).randrange(1000)]


def prompt_of(example: int) -> list[int]:
    return [1, example]


def first_token(example: int, answer: list[int]) -> float:
    return answer[0]


def fails_at(*examples: int) -> Any:
    def reward(example: int, answer: list[int]) -> float:
        if example in examples:
            raise ZeroDivisionError(f"no reward for {example}")
        return answer[0]

    return reward


def trainer_of(model: SimulatedModel, reward: Any = first_token, examples: int = 5, **options: Any) -> RLTrainer:
    groups = from_functions(range(examples), prompt_of, reward, group_size=3)
    options = {"max_tokens": 1, "seed": 7} | options
    return RLTrainer(model, groups, options.pop("plan", PLAN), ADAM, **options)  # type: ignore[arg-type]


async def test_groups_are_trained_on_in_order_and_over_and_over() -> None:
    model = SimulatedModel(SimulatedSampler(drawn))
    await trainer_of(model).run(4)
    examples = [data[0].model_input.to_ints()[1] for data in model.trained]
    assert (examples, model.steps) == ([0, 1, 2, 3, 4, 0, 1, 2], 4)


async def test_a_seed_makes_a_run_the_same_and_no_two_samples() -> None:
    samplers = [SimulatedSampler(drawn) for _ in range(2)]
    for sampler in samplers:
        await trainer_of(SimulatedModel(sampler)).run(3)
    first, second = ([params.seed for _, params in sampler.requests] for sampler in samplers)
    assert sorted(first) == sorted(second)  # type: ignore[type-var]
    assert len(set(first)) == len(first) == 18


async def test_a_failure_loses_only_its_group_and_is_counted_by_its_type(caplog: pytest.LogCaptureFixture) -> None:
    model, log = SimulatedModel(SimulatedSampler(drawn)), Log()
    with caplog.at_level(logging.WARNING):
        await trainer_of(model, fails_at(1), logger=log).run(2)
    assert [data[0].model_input.to_ints()[1] for data in model.trained] == [0, 2, 3]
    assert [line["rollout_errors/ZeroDivisionError"] for _, line in log.lines] == [1, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "group 1 of the data is not trained on: ZeroDivisionError: no reward for 1"
    ]


async def test_groups_of_equal_rewards_are_counted_and_rewarded_but_not_trained_on() -> None:
    model, log = SimulatedModel(SimulatedSampler(drawn)), Log()
    await trainer_of(model, lambda example, answer: 1 if example == 1 else answer[0], logger=log).run(1)
    assert [data[0].model_input.to_ints()[1] for data in model.trained] == [0]
    [(step, line)] = log.lines
    assert (step, line["progress/groups_with_equal_rewards"], line["env/all/total_episodes"]) == (0, 1, 6)


@pytest.mark.parametrize("most_stale", [0, 2])
async def test_a_run_in_which_every_group_fails_ends_with_the_causes(most_stale: int) -> None:
    model = SimulatedModel(SimulatedSampler(drawn))
    plan = MinibatchPlan(groups_per_step=2, groups_per_minibatch=1, most_stale_steps=most_stale)
    trainer = trainer_of(model, fails_at(*range(5)), plan=plan, most_fruitless_groups=7)
    with pytest.raises(NothingToTrainOn, match=r"7 groups in a row .* after 0 steps: ZeroDivisionError \(7\)") as ended:
        await trainer.run(1)
    assert ended.value.causes == {"ZeroDivisionError": 7}


async def test_a_run_that_has_nothing_left_to_learn_ends_and_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    """The groups have equal rewards after the third."""
    manager, model = Manager(save_every=5), SimulatedModel(SimulatedSampler(drawn))
    left = iter(range(3 * 3))
    trainer = trainer_of(model, lambda example, answer: next(left, 1), checkpoints=manager, most_fruitless_groups=9)
    assert await trainer.run(10) == 2
    assert [each.step for each in manager.saved] == [2]
    assert "the run ends after 2 of 10 steps: 9 groups in a row" in caplog.text
    assert await trainer.run(2) == 2


async def test_a_reward_that_is_not_a_number_costs_its_group_not_the_weights() -> None:
    model, log = SimulatedModel(SimulatedSampler(drawn)), Log()
    reward = lambda example, answer: float("nan") if example == 0 else answer[0]  # noqa: E731
    await trainer_of(model, reward, logger=log).run(1)
    assert [data[0].model_input.to_ints()[1] for data in model.trained] == [1]
    assert log.lines[0][1]["rollout_errors/UnfitRollout"] == 1


@pytest.mark.parametrize("in_environment", [ConnectionError("gone"), tinker.TinkerError("gone")])
async def test_an_error_of_the_server_ends_the_run(in_environment: Exception) -> None:
    def gone(prompt: list[int], seed: int | None) -> list[int]:
        if prompt[1] == 3:
            raise in_environment
        return drawn(prompt, seed)

    model = SimulatedModel(SimulatedSampler(gone))
    with pytest.raises(type(in_environment), match="gone"):
        await trainer_of(model).run(5)
    assert model.steps == 1


async def test_a_prompt_that_the_server_refuses_costs_its_group() -> None:
    def refusing(prompt: list[int], seed: int | None) -> list[int]:
        if prompt[1] == 1:
            raise tinker.RequestFailedError("too long", "1", types.RequestErrorCategory.User)
        return drawn(prompt, seed)

    model = SimulatedModel(SimulatedSampler(refusing))
    await trainer_of(model).run(1)
    assert [data[0].model_input.to_ints()[1] for data in model.trained] == [0]


async def test_off_policy_no_group_is_older_than_the_bound() -> None:
    reports: list[StepReport] = []

    async def keep(report: StepReport, _: tinker.SamplingClient) -> None:
        reports.append(report)

    plan = MinibatchPlan(groups_per_step=2, groups_per_minibatch=1, most_stale_steps=2)
    await trainer_of(SimulatedModel(SimulatedSampler(drawn)), plan=plan, on_step=[keep]).run(8)
    staleness = [behind for report in reports for behind in report.staleness]
    assert (len(staleness), max(staleness)) == (16, 2)


async def test_a_strategy_of_the_cookbook_retries_a_failed_group() -> None:
    failed: list[int] = []

    def fails_once(example: int, answer: list[int]) -> float:
        if example == 1 and not failed:
            failed.append(example)
            raise ZeroDivisionError
        return answer[0]

    sampler = SimulatedSampler(lambda prompt, seed: [random.randrange(1000)])
    model = SimulatedModel(sampler)
    await trainer_of(model, fails_once, seed=None, strategy=RetryOnFailure(max_retries=1)).run(1)
    assert [len(data) for data in model.trained] == [3, 3]
    with pytest.raises(ValueError, match="give a seed or a strategy"):
        trainer_of(model, strategy=RetryOnFailure())


async def test_a_resumed_run_continues_after_the_last_step_in_data_and_seeds() -> None:
    whole, rest = (SimulatedModel(SimulatedSampler(drawn)) for _ in range(2))
    manager = Manager(save_every=2)
    await trainer_of(whole, checkpoints=manager).run(4)
    trainer = trainer_of(rest, resumed=manager.saved[0])
    await trainer.run(4)
    assert trainer.step == 4
    assert numbers_of(rest) == numbers_of(whole)[4 * 3 :]


async def test_a_resumed_run_that_has_nothing_left_to_learn_ends_at_the_step_of_an_undisturbed_one() -> None:
    """The save is in the middle of a row of groups without data, which is counted on."""
    reward = lambda example, answer: answer[0] if example in (0, 6) else 1  # noqa: E731
    plan = MinibatchPlan(groups_per_step=4, groups_per_minibatch=4)
    options: Any = {"plan": plan, "examples": 12, "most_fruitless_groups": 5}
    manager = Manager(save_every=1)
    assert await trainer_of(SimulatedModel(SimulatedSampler(drawn)), reward, checkpoints=manager, **options).run(9) == 1
    resumed = trainer_of(SimulatedModel(SimulatedSampler(drawn)), reward, resumed=manager.saved[0], **options)
    assert manager.saved[0].loop_state["fruitless"] == {"equal rewards": 3}
    assert await resumed.run(9) == 1


async def test_a_second_run_begins_with_the_unfinished_groups_of_the_first() -> None:
    """Off-policy, more groups are sampled than trained on."""
    model = SimulatedModel(SimulatedSampler(drawn))
    plan = MinibatchPlan(groups_per_step=2, groups_per_minibatch=1, most_stale_steps=1)
    trainer = trainer_of(model, plan=plan, examples=100)
    for steps in (1, 2, 3):
        await trainer.run(steps)
    assert sorted(data[0].model_input.to_ints()[1] for data in model.trained) == [0, 1, 2, 3, 4, 5]


def test_a_checkpoint_of_another_loop_is_refused_with_a_sentence() -> None:
    model = SimulatedModel(SimulatedSampler(drawn))
    other: Any = Resumed(3, model, {"batch": 1}, {}, ())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step 3 is from another loop"):
        trainer_of(model, resumed=other)


async def test_a_failed_shadow_is_reported_and_the_run_continues(caplog: pytest.LogCaptureFixture) -> None:
    main = SimulatedModel(SimulatedSampler(drawn))
    second = SimulatedModel(SimulatedSampler(drawn), fails={1: tinker.TinkerError("out of memory")})
    shadow = ShadowClient("big", second, ADAM, most_steps_waiting=9)  # type: ignore[arg-type]
    await trainer_of(main, shadows=[shadow]).run(4)
    assert (main.steps, second.steps, shadow.missed_steps) == (4, 1, 3)
    assert str(shadow.failure) == "out of memory"
    assert "shadow big failed at step 1, and trains no more: out of memory" in caplog.text


async def test_a_shadow_does_not_outlive_a_run_that_fails() -> None:
    class Endless(SimulatedModel):
        async def forward_backward(self, data: list[tinker.Datum], *_: Any) -> types.ForwardBackwardOutput:
            await asyncio.Event().wait()
            raise AssertionError("it was cancelled")

    async def fail(report: StepReport, _: tinker.SamplingClient) -> None:
        await asyncio.sleep(0)  # the shadow begins
        raise ZeroDivisionError

    sampler = SimulatedSampler(drawn)
    shadow = ShadowClient("slow", Endless(sampler), ADAM)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        await trainer_of(SimulatedModel(sampler), shadows=[shadow], on_step=[fail]).run(4)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert isinstance(shadow.failure, ShadowCutOff)
