"""The worker dies at every place that matters: nothing acknowledged is lost or run twice.

Each case kills the process by SIGKILL at a named place, starts it anew, and submits only what was never
acknowledged. All results, and the final weights and optimizer state, must equal those of an
undisturbed run bit for bit.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.worker.process import (
    MODEL,
    WorkerProcess,
    broken_train,
    create,
    run_program,
    save,
    save_ephemeral,
    step,
    train,
)
from support.worker.restarts import Lives
from tinsmith_trainer.process.failpoints import FAILPOINTS

from .test_deadly_operations import load_what_was_saved

PROGRAM = [
    create(),
    *(train(1), train(2, (9, 2, 6)), step(3)),
    *(train(4, (5, 3, 5)), train(5, forward_only=True), step(6), save(7, "middle")),
    *(broken_train(8), train(9), step(10)),  # this step fails, and the next round works
    *(train(11, (8, 9, 7)), save_ephemeral(12), step(13)),
    *(train(14, (9, 3, 2, 3)), step(15), save(16, "final")),
]
ARRIVALS = (1, 2, 5, 9)
EAGER = ("--snapshot-replay-seconds=0", "--snapshot-cost-factor=0")
"""A snapshot after every gradient and step."""
PARKING = ("park-before-journal", "park-before-drop", "restore-before-load")
REACHED = {"save-before-write": 3, "checkpoint-before-manifest": 3, "checkpoint-before-commit": 3}
REACHED |= dict.fromkeys((*PARKING, "operation-preempted", "forward-shared", "load-read"), 0)
"""Three saves: the places inside them are reached three times. One model: nothing of it is preempted or parked, nor
shares a forward; these have tests of their own, and so have loads."""


@dataclass(frozen=True)
class Ending:
    """The results of a program: every answer, and the bytes of its final checkpoint."""

    results: dict[int, bytes]
    final_files: dict[str, bytes]
    checkpoints: list[str]


async def run(folder: Path, flags: tuple[str, ...] = (), **environment: str) -> tuple[Ending, list[int]]:
    worker, restarted_at = WorkerProcess(folder, flags), list[int]()
    try:
        await worker.start(**environment)
        results = await run_program(worker, PROGRAM, restarted_at)
        events = [event.checkpoint_saved for event in await worker.events() if event.HasField("checkpoint_saved")]
        assert [event.seq_id for event in events] == [7, 12, 16], "each save was announced exactly once"
        final = folder / "checkpoints" / events[-1].directory
        files = {path.name: path.read_bytes() for path in final.iterdir()}
        return Ending(results, files, [event.name for event in events]), restarted_at
    finally:
        await worker.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    ending, restarted_at = asyncio.run(run(tmp_path_factory.mktemp("undisturbed")))
    assert restarted_at == []
    return ending


def cases() -> list[object]:
    return [
        pytest.param(f"{name}:{arrival}", EAGER if name.startswith("snapshot-") else (), id=f"{name}-{arrival}")
        for name in FAILPOINTS
        for arrival in ARRIVALS
        if arrival <= REACHED.get(name, arrival)
    ]


@pytest.mark.parametrize(("failpoint", "flags"), cases())
async def test_a_death_here_changes_nothing(
    failpoint: str, flags: tuple[str, ...], undisturbed: Ending, tmp_path: Path
) -> None:
    ending, restarted_at = await run(tmp_path, flags, TINSMITH_FAILPOINT=failpoint)
    assert restarted_at, "the place was never reached: this case proves nothing"
    assert ending == undisturbed


async def test_the_program_itself_shows_a_failed_window(undisturbed: Ending) -> None:
    """Otherwise the grid would not cover how failures are replayed."""
    assert b"never" not in undisturbed.results[10]
    assert b"forward_backward 8 failed" in undisturbed.results[10]
    assert b"grad_norm" in undisturbed.results[13]


LOADS = [
    *(create(), train(1), step(2), save(3, "a"), train(4), step(5)),
    *(train(7), step(8), save(9, "final")),
]


@pytest.mark.parametrize("failpoint", ["load-read:1", "snapshot-before-commit:2"])
async def test_a_death_while_a_checkpoint_is_loaded_changes_nothing(failpoint: str, tmp_path: Path) -> None:
    """The load is read again, into the model as it was before it."""
    endings = []
    for folder, environment in (("undisturbed", {}), ("disturbed", {"TINSMITH_FAILPOINT": failpoint})):
        lives = Lives(WorkerProcess(tmp_path / folder))
        try:
            await lives.worker.start(**environment)
            await lives.run(LOADS[:6])
            await lives.run([await load_what_was_saved(lives, 6), *LOADS[6:]])
            events = [event.checkpoint_saved for event in await lives.worker.events() if event.checkpoint_saved.name]
            final = tmp_path / folder / "checkpoints" / events[-1].directory
            endings.append((lives.results(MODEL), {path.name: path.read_bytes() for path in final.iterdir()}))
        finally:
            await lives.worker.kill()
    assert lives.ended == 1, "the place was never reached: this case proves nothing"
    assert endings[0] == endings[1]
