"""Saves in a thread: one at a time, without losing failures."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinsmith
from tinsmith.training.checkpoints.background import BackgroundSaves
from tinsmith.training.errors import SaveFailed

LIMIT_SECONDS = 20.0
PROGRAM = """
import threading
from tinsmith.training.checkpoints.background import BackgroundSaves
saves, begun = BackgroundSaves(), threading.Event()
def held():
    begun.set()
    threading.Event().wait({seconds})
    print("saved", flush=True)
saves.start(4, held)
begun.wait()
{end}
"""


@pytest.fixture
def saves() -> Iterator[BackgroundSaves]:
    saves = BackgroundSaves()
    yield saves
    saves.close()


def fail() -> None:
    raise ConnectionError("the disk is full")


def failed(saves: BackgroundSaves, step: int) -> None:
    """Wait until the save has failed, before any call has reported it."""
    ended = threading.Event()

    def save() -> None:
        try:
            fail()
        finally:
            ended.set()

    saves.start(step, save)
    assert ended.wait(LIMIT_SECONDS)


def test_a_save_runs_in_the_background_of_its_caller(saves: BackgroundSaves) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def save() -> None:
        begun.set()
        assert go_on.wait(LIMIT_SECONDS)

    saves.start(1, save)
    assert begun.wait(LIMIT_SECONDS)
    saves.raise_failure()
    go_on.set()
    saves.wait()


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


def test_a_waiter_for_an_abandoned_save_gets_an_error(saves: BackgroundSaves) -> None:
    go_on, told = threading.Event(), []

    def wait() -> None:
        try:
            saves.wait()
        except SaveFailed as error:
            told.append(str(error))

    saves.start(4, lambda: assert_soon(go_on))
    waits = threading.Thread(target=wait)
    waits.start()
    assert saves.abandon() == 4
    waits.join(LIMIT_SECONDS)
    assert told == ["saving step 4: the program was interrupted"]
    go_on.set()
    assert saves.abandon() is None


def test_an_interrupt_of_the_final_wait_abandons_the_save(
    saves: BackgroundSaves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second Ctrl-C arrives after the loop has ended."""
    go_on = threading.Event()

    def interrupted() -> None:
        raise KeyboardInterrupt

    saves.start(4, lambda: assert_soon(go_on))
    with monkeypatch.context() as patched:
        patched.setattr(saves, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saves.close()
    assert saves.is_abandoned
    with pytest.raises(SaveFailed, match="the program was interrupted"):
        saves.wait()
    go_on.set()


def assert_soon(event: threading.Event) -> None:
    assert event.wait(LIMIT_SECONDS)


@pytest.mark.parametrize(
    ("end", "seconds", "message"),
    [("saves.abandon()", None, ""), ("", 0.2, "saved\n")],
    ids=["abandoned", "not abandoned"],
)
@pytest.mark.slow("starts programs that import the client")
def test_a_program_waits_at_its_end_for_a_save_unless_it_was_abandoned(
    end: str, seconds: float | None, message: str
) -> None:
    program = PROGRAM.format(end=end, seconds=seconds)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(tinsmith.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == (message, "")
