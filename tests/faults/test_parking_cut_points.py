"""The worker dies while adapters change places in its memory: no operation is lost or run twice.

Two models share one slot, so that each waits for the other in the middle of its accumulation windows.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.worker.process import MODEL, WorkerProcess, broken_train, create, run_program, save, step, train

from .test_worker_cut_points import PARKING

OTHER = "sess:train:1"
PARTS = (
    (create(), train(1)),
    (train(2, (9, 2, 6)), step(3), broken_train(4)),
    (train(5, (5, 3, 5)), step(6), train(7)),
    (step(8), train(9, forward_only=True), save(10, "final")),
)
"""The program of each of the models, in turn. A window ends in another part than it begins in; one is incomplete."""
PROGRAM = [[replace(call, model_id=model_id) for call in part] for part in PARTS for model_id in (MODEL, OTHER)]
EXCHANGES = len(PROGRAM) - 1
ONE_SLOT = ("--adapter-slots=1",)


@dataclass(frozen=True)
class Ending:
    """The results of a program: every answer, and the bytes of its final checkpoints."""

    results: list[dict[int, bytes]]
    final_files: dict[str, dict[str, bytes]]


async def run(folder: Path, flags: tuple[str, ...], **environment: str) -> tuple[Ending, int]:
    """Run the program, and return also how often it was restarted."""
    worker, restarted_at = WorkerProcess(folder, flags), list[int]()
    try:
        await worker.start(**environment)
        results = [await run_program(worker, part, restarted_at) for part in PROGRAM]
        saved = [event.checkpoint_saved for event in await worker.events() if event.HasField("checkpoint_saved")]
        assert sorted(event.model_id for event in saved) == [MODEL, OTHER], "each save was announced exactly once"
        folders = {event.model_id: folder / "checkpoints" / event.directory for event in saved}
        files = {
            model_id: {path.name: path.read_bytes() for path in final.iterdir()} for model_id, final in folders.items()
        }
        return Ending(results, files), len(restarted_at)
    finally:
        await worker.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    """Return the results of a worker with a slot for each model."""
    ending, restarts = asyncio.run(run(tmp_path_factory.mktemp("undisturbed"), ("--adapter-slots=2",)))
    assert restarts == 0
    return ending


@pytest.mark.parametrize("arrival", [1, 2, 3, EXCHANGES - 1])
@pytest.mark.parametrize("failpoint", PARKING)
async def test_a_death_between_memory_and_volume_changes_nothing(
    failpoint: str, arrival: int, undisturbed: Ending, tmp_path: Path
) -> None:
    ending, restarts = await run(tmp_path, ONE_SLOT, TINSMITH_FAILPOINT=f"{failpoint}:{arrival}")
    assert restarts == 1, "the place was never reached: this case proves nothing"
    assert ending == undisturbed


async def test_the_program_itself_shows_a_failed_window(undisturbed: Ending) -> None:
    """Otherwise the grid would not cover that a parked model remembers why its next step must fail."""
    answers = {seq_id: answer for part in undisturbed.results for seq_id, answer in part.items()}
    assert b"forward_backward 4 failed" in answers[6]
    assert b"grad_norm" in answers[8]
