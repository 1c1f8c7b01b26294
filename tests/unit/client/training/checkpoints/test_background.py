"""Saves in a thread: one at a time, and no failure is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tinsmith.training.checkpoints.background import BackgroundSaves
from tinsmith.training.errors import SaveFailed

LIMIT_SECONDS = 20.0


@pytest.fixture
def saves() -> Iterator[BackgroundSaves]:
    saves = BackgroundSaves()
    yield saves
    saves.close()


def fail() -> None:
    raise ConnectionError("the disk is full")


def failed(saves: BackgroundSaves, step: int) -> None:
    """Has failed, and nobody knows yet."""
    ended = threading.Event()

    def save() -> None:
        try:
            fail()
        finally:
            ended.set()

    saves.start(step, save)
    assert ended.wait(LIMIT_SECONDS)


def test_a_save_runs_beside_its_caller(saves: BackgroundSaves) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def save() -> None:
        begun.set()
        assert go_on.wait(LIMIT_SECONDS)

    saves.start(1, save)
    assert begun.wait(LIMIT_SECONDS)
    saves.raise_failure()
    go_on.set()
    saves.wait()


def test_the_next_save_begins_after_the_one_before(saves: BackgroundSaves) -> None:
    order: list[int] = []
    for step in range(20):
        saves.start(step, lambda step=step: order.append(step))  # type: ignore[misc]
    saves.wait()
    assert order == list(range(20))


def test_a_failure_is_raised_at_the_next_save_which_then_does_not_begin(saves: BackgroundSaves) -> None:
    failed(saves, 4)
    begun: list[int] = []
    with pytest.raises(SaveFailed, match="saving step 4: the disk is full") as failure:
        saves.start(6, lambda: begun.append(6))
    assert isinstance(failure.value.__cause__, ConnectionError)
    assert begun == []
    saves.start(6, lambda: begun.append(6))
    saves.wait()
    assert begun == [6]


def test_a_failure_is_raised_once(saves: BackgroundSaves) -> None:
    failed(saves, 4)
    with pytest.raises(SaveFailed):
        saves.wait()
    saves.wait()


def test_an_end_raises_a_failure() -> None:
    saves = BackgroundSaves()
    failed(saves, 4)
    with pytest.raises(SaveFailed, match="step 4"):
        saves.close()
