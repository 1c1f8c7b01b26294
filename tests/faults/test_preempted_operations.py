"""A worker that dies while an operation is preempted, or shares a forward.

It remains one operation, replayed as one, and no other operation is blamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.engine.deadly import KILLS
from support.worker.process import MODEL, Call, WorkerProcess, create, save, step, train, train_many
from support.worker.restarts import Lives

OTHER = "sess:train:1"
ENGINE = "--engine=support.engine.deadly:build_deadly"
ONE_ATTEMPT = "--attempts-per-operation=1"
A_MICROBATCH = {"TINSMITH_REFERENCE_DELAY_SECONDS": "0.02"}
SHARED_FORWARDS = {"TINSMITH_REFERENCE_SHARED_TOKENS": "1000"}
MANY = 400
MINE = [train_many(1, MANY), step(2), train_many(3, 40), step(4), save(5, "final")]
OTHERS = [train(1, (5, 3, 5)), train_many(2, 60), step(3), train(4, forward_only=True), save(5, "final")]


@dataclass(frozen=True)
class Ending:
    """Every answer, and the tensors of the final checkpoints."""

    results: list[dict[int, bytes]]
    files: list[dict[str, bytes]]


@asynccontextmanager
async def lives_of_a_worker(
    folder: Path, *flags: str, shares: bool = False, **environment: str
) -> AsyncIterator[Lives]:
    process = WorkerProcess(folder, (ENGINE, *flags), A_MICROBATCH | (SHARED_FORWARDS if shares else {}))
    try:
        await process.start(**environment)
        yield Lives(process)
    finally:
        await process.kill()


async def run(lives: Lives, others: list[Call]) -> Ending:
    """Run the long operation first, then those of the other model."""
    await lives.run([create(), create(model_id=OTHER)])
    await lives.run_beside(MINE, [replace(call, model_id=OTHER) for call in others])
    models = (MODEL, OTHER)
    return Ending([lives.results(model) for model in models], [await lives.saved_files(model) for model in models])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    async def live() -> Ending:
        async with lives_of_a_worker(tmp_path_factory.mktemp("undisturbed")) as lives:
            ending = await run(lives, OTHERS)
            assert lives.ended == 0
            return ending

    return asyncio.run(live())


@pytest.mark.parametrize(
    ("failpoint", "flag"),
    [
        *((f"operation-preempted:{arrival}", ONE_ATTEMPT) for arrival in (1, 2, 7)),
        *((f"executed-before-result:{arrival}", ONE_ATTEMPT) for arrival in (3, 4)),
        # In the journal's thread, during a microbatch of the other operation, which gets the blame: once is no harm.
        *((f"result-before-{place}:3", "--attempts-per-operation=2") for place in ("sync", "visible")),
    ],
)
async def test_a_death_while_an_operation_is_preempted_changes_nothing(
    failpoint: str, flag: str, undisturbed: Ending, tmp_path: Path
) -> None:
    async with lives_of_a_worker(tmp_path, flag, TINSMITH_FAILPOINT=failpoint) as lives:
        assert await run(lives, OTHERS) == undisturbed
        assert lives.ended == 1, "the place was never reached: this case proves nothing"


async def test_the_operation_that_kills_the_worker_is_blamed_and_not_the_preempted_one(
    undisturbed: Ending, tmp_path: Path
) -> None:
    async with lives_of_a_worker(tmp_path, ONE_ATTEMPT) as lives:
        ending = await run(lives, [train(1, (KILLS, 3, 5)), *OTHERS[1:]])
        assert lives.ended == 1
        assert "forward_backward 1 was given up" in lives.failure(1, OTHER)
        assert "forward_backward 1 was given up" in lives.failure(3, OTHER)
        assert (ending.results[0], ending.files[0]) == (undisturbed.results[0], undisturbed.files[0])


@pytest.mark.parametrize("arrival", [1, 2, 4])
async def test_a_death_in_a_shared_forward_blames_no_operation_until_one_dies_alone(
    arrival: int, undisturbed: Ending, tmp_path: Path
) -> None:
    failpoint = f"forward-shared:{arrival}"
    async with lives_of_a_worker(tmp_path, ONE_ATTEMPT, shares=True, TINSMITH_FAILPOINT=failpoint) as lives:
        assert await run(lives, OTHERS) == undisturbed
        assert lives.ended == 1, "the place was never reached: this case proves nothing"


async def test_separate_runs_find_the_operation_that_kills_a_shared_forward(
    undisturbed: Ending, tmp_path: Path
) -> None:
    async with lives_of_a_worker(tmp_path, ONE_ATTEMPT, shares=True) as lives:
        deadly = train_many(2, 56, last=(KILLS, 3, 5))
        ending = await run(lives, [OTHERS[0], deadly, *OTHERS[2:]])
        assert 1 <= lives.ended <= 2
        assert "forward_backward 2 was given up" in lives.failure(2, OTHER)
        assert (ending.results[0], ending.files[0]) == (undisturbed.results[0], undisturbed.files[0])


async def test_a_preempted_operation_that_kills_the_worker_is_blamed_and_not_the_operation_between(
    undisturbed: Ending, tmp_path: Path
) -> None:
    async with lives_of_a_worker(tmp_path, ONE_ATTEMPT) as lives:
        await lives.run([create(), create(model_id=OTHER)])
        deadly = train_many(1, MANY, last=(KILLS, 3, 5))
        await lives.run_beside([deadly, *MINE[1:]], [replace(call, model_id=OTHER) for call in OTHERS])
        assert lives.ended == 1
        assert "forward_backward 1 was given up" in lives.failure(1, MODEL)
        assert lives.results(OTHER) == undisturbed.results[1]
        assert await lives.saved_files(OTHER) == undisturbed.files[1]
