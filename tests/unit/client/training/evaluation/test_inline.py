"""An evaluation during a run never raises into it, never piles up, and is logged for its own step."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import tinker
from support.client.scripted_sampling import ScriptedSampling
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator, TrainingClientEvaluator
from tinsmith.training.errors import EvaluationError
from tinsmith.training.evaluation import inline
from tinsmith.training.evaluation.examples import Answer, Example, ExampleResult
from tinsmith.training.evaluation.inline import Evaluated, InlineEvaluator
from tinsmith.training.evaluation.results import read_rows
from tinsmith.training.evaluation.tasks import Task

pytestmark = pytest.mark.pytorch


class Run:
    """A training client that records its calls in order."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._failure = failure

    @property
    def client(self) -> tinker.TrainingClient:
        return cast(tinker.TrainingClient, self)

    def step(self) -> None:
        self.calls.append("step")

    def forward(self) -> None:
        self.calls.append("forward")

    def save_weights_and_get_sampling_client(self) -> Any:
        self.calls.append("save")
        return Saved(self._failure)


class Saved:
    """A future with the SDK's interface that need not be awaited."""

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    def __await__(self) -> Any:
        return self._result().__await__()

    async def _result(self) -> ScriptedSampling:
        if self._failure is not None:
            raise self._failure
        return ScriptedSampling()


class HeldOut(TrainingClientEvaluator):
    async def __call__(self, training_client: Any) -> dict[str, float]:
        await asyncio.sleep(0.01)
        training_client.forward()
        return {"test/nll": 2.0}


class Broken(SamplingClientEvaluator):
    name = "broken"

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        raise RuntimeError("no luck")


def task(grade: Callable[[Example, Answer], float] = lambda _example, _answer: 1.0, name: str = "ones") -> Task:
    return Task(name, [Example([1]), Example([2])], grade, tokenizer=False)


def test_every_so_many_steps_the_weights_are_saved_in_their_turn() -> None:
    run = Run()
    with InlineEvaluator([task()], every=3, at_once=9) as evaluator:
        for step in range(7):
            assert evaluator.maybe_evaluate(run.client, step) == (step % 3 == 0)
            run.step()
    assert run.calls == ["save", *["step"] * 3, "save", *["step"] * 3, "save", "step"]
    assert sorted(one.step for one in evaluator.finished) == [0, 3, 6]


def test_an_evaluation_beyond_the_limit_is_skipped_without_a_save() -> None:
    release, run = threading.Event(), Run()

    def held_up(_example: Example, _answer: Answer) -> float:
        assert release.wait(30)
        return 1.0

    with InlineEvaluator([task(held_up)], every=1, at_once=1, waiting=1) as evaluator:
        assert [evaluator.maybe_evaluate(run.client, step) for step in range(1, 5)] == [True, True, False, False]
        assert run.calls == ["save", "save"]
        release.set()
    assert evaluator.skipped == [3, 4]
    assert [one.step for one in evaluator.finished] == [1, 2]


def test_a_task_that_fails_costs_its_result_alone() -> None:
    with InlineEvaluator([Broken(), task()], every=1) as evaluator:
        evaluator.maybe_evaluate(Run().client, 1)
    [evaluated] = evaluator.finished
    assert evaluated.failures == {"broken": "RuntimeError: no luck"}
    assert evaluated.metrics == {"eval/ones/score": 1.0}
    assert evaluated.estimates["eval/ones/score"].examples == 2


def test_calls_of_a_training_clients_evaluator_come_before_the_next_step() -> None:
    run = Run()
    with InlineEvaluator([HeldOut()], every=1) as evaluator:
        evaluator.maybe_evaluate(run.client, 1)
        run.step()
    assert run.calls == ["forward", "step"]
    assert evaluator.finished[0].metrics == {"eval/HeldOut/nll": 2.0}


async def test_a_program_of_asyncio_waits_without_holding_its_loop() -> None:
    release = threading.Event()

    def held_up(_example: Example, _answer: Answer) -> float:
        assert release.wait(30)
        return 1.0

    async with InlineEvaluator([task(held_up)], every=1) as evaluator:
        evaluator.maybe_evaluate(Run().client, 1)
        asyncio.get_running_loop().call_later(0.01, release.set)
        await evaluator.drain()
        assert [one.step for one in evaluator.finished] == [1]


def test_running_groups_do_not_delay_an_error_of_the_loop() -> None:
    begun = threading.Event()

    class Endless(SamplingClientEvaluator):
        async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError("it was cancelled")

    evaluator = InlineEvaluator([Endless()], every=1)

    def loop() -> None:
        with evaluator:
            evaluator.maybe_evaluate(Run().client, 1)
            assert begun.wait(30)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert evaluator.finished == []


def test_answers_are_kept_as_a_sweep_keeps_them(tmp_path: Path) -> None:
    with InlineEvaluator([task()], every=1, waiting=1, directory=tmp_path) as evaluator:
        for step in (1, 2):
            evaluator.maybe_evaluate(Run().client, step)
    rows = list(read_rows(tmp_path))
    assert [(row.step, row.example, row.scores) for row in rows] == [
        (step, example, {"score": 1.0}) for step in (1, 2) for example in ("0", "1")
    ]
    assert list(json.loads((tmp_path / "tasks.json").read_text())) == ["ones"]


def test_an_answer_that_cannot_be_written_loses_only_its_row_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer has a token that the tokenizer cannot decode."""

    def impossible(result: ExampleResult) -> list[dict[str, Any]]:
        return [{"logprobs": [float("-inf") if result.example == "0" else -1.0]}]

    monkeypatch.setattr(inline, "described", impossible)
    with InlineEvaluator([task()], every=1, directory=tmp_path) as evaluator:
        evaluator.maybe_evaluate(Run().client, 1)
    [evaluated] = evaluator.finished
    assert evaluated.failures["answers"].startswith("example 0 of ones was not written: Out of range float")
    assert evaluated.metrics == {"eval/ones/score": 1.0}
    assert [row.example for row in read_rows(tmp_path)] == ["1"]


def test_metrics_are_logged_for_their_own_step_on_the_callers_thread() -> None:
    """A logger of the cookbook need not support a second thread."""
    logged: list[tuple[dict[str, float], int | None]] = []
    threads, results = set(), list[Evaluated]()

    class Log:
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            logged.append((metrics, step))
            threads.add(threading.current_thread())

    evaluator = InlineEvaluator([task()], every=1, at_once=3, logger=cast(Any, Log()), on_result=results.append)
    with evaluator:
        for step in (1, 2):
            evaluator.maybe_evaluate(Run().client, step)
    assert sorted(logged, key=lambda one: one[1] or 0) == [({"eval/ones/score": 1.0}, step) for step in (1, 2)]
    assert threads == {threading.current_thread()}
    assert results == evaluator.finished


def test_a_failed_save_of_the_weights_is_reported_as_the_failure_of_the_tasks() -> None:
    with InlineEvaluator([task()], every=1) as evaluator:
        evaluator.maybe_evaluate(Run(RuntimeError("no disk")).client, 1)
    assert evaluator.finished[0].failures == {"ones": "the weights could not be saved: no disk"}


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 1, "at_once": 0}, {"every": 1, "waiting": -1}])
def test_numbers_below_their_minimum_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(EvaluationError, match="the minimum is 1, 1 and 0"):
        InlineEvaluator([task()], **wrong)
