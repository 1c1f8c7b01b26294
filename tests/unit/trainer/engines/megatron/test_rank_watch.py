"""A rank that dies between two calls is noticed; one that is busy is left alone."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import RayActorError
from tinsmith_trainer.engines.megatron import ray_ranks
from tinsmith_trainer.engines.megatron.ray_ranks import RankWatch

SECONDS = 30.0


class Rank:
    """A handle of an actor with Ray's interface. Its answers are futures; while `busy` there are none."""

    def __init__(self) -> None:
        self.own_questions: list[Future[bool]] = []
        self.busy = threading.Event()
        self.dead = threading.Event()
        self.answered = threading.Semaphore(0)
        self.__ray_ready__ = self

    def remote(self) -> Future[bool]:
        question: Future[bool] = Future()
        self.own_questions.append(question)
        return question

    def answer(self, question: Future[bool]) -> bool:
        """Answer the question, if there is one, with or without an error."""
        if self.dead.is_set():
            question.set_exception(RayActorError())
        elif self.busy.is_set():
            return False
        else:
            question.set_result(True)
        self.answered.release()
        return True


class StandIn:
    """The part of Ray's interface that a watch needs."""

    def __init__(self, ranks: list[Rank]) -> None:
        self._ranks = ranks

    def wait(self, questions: list[Future[bool]], timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout == 0
        [question] = questions
        [rank] = [rank for rank in self._ranks if question in rank.own_questions]
        return ([question], []) if rank.answer(question) else ([], [question])

    def get(self, question: Future[bool]) -> bool:
        return question.result()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    ranks = [Rank(), Rank()]
    monkeypatch.setattr(ray_ranks, "ray", StandIn(ranks))
    return ranks


def test_a_rank_that_dies_between_calls_is_reported_once(ranks: list[Rank]) -> None:
    lost, told = threading.Event(), itertools.count()

    def on_lost() -> None:
        next(told)
        lost.set()

    watching = RankWatch(ranks, on_lost, every_seconds=0.001)
    for rank in ranks:
        assert rank.answered.acquire(timeout=SECONDS)
    assert not lost.is_set()
    ranks[1].dead.set()
    assert lost.wait(SECONDS)
    watching.close()
    assert next(told) == 1


def test_ranks_that_are_ended_on_purpose_are_not_lost(ranks: list[Rank]) -> None:
    lost = threading.Event()
    watching = RankWatch(ranks, lost.set, every_seconds=0.001)
    watching.close()
    watching.close()
    for rank in ranks:
        rank.dead.set()
    assert not watching._thread.is_alive()
    assert not lost.is_set()


def test_the_loss_ends_the_worker_while_its_error_is_handled(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: Future[str] = Future()
    monkeypatch.setattr(ray_ranks, "end_process", ended.set_result)
    ranks[0].dead.set()
    watching = RankWatch(ranks, every_seconds=0.001)
    assert ended.result(SECONDS) == "a rank of the model is gone"
    watching.close()
