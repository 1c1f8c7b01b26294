"""Ranks of a model die, between calls or in the middle of one: the worker ends, and its successor continues."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.worker.process import Call, WorkerProcess, as_compared, create, save, step, train

FLAGS = ("--engine=nemo-rl", "--ranks=2", "--no-sampling", "--max-rank=8", "--snapshot-replay-seconds=0")
START_SECONDS = 240.0
GONE_SECONDS = 120.0
UNDISTURBED, DISTURBED = "sess:train:0", "sess:train:1"
FIRST_HALF = [create(), train(1), train(2, (9, 2, 6)), step(3), train(4, (5, 3, 5))]
SECOND_HALF = [step(5), train(6, (8, 9, 7)), step(7), train(8), step(9), save(10, "final")]


def of(model_id: str, calls: list[Call]) -> list[Call]:
    return [replace(call, model_id=model_id) for call in calls]


async def run(worker: WorkerProcess, calls: list[Call]) -> list[bytes]:
    """Return the answer to each call."""
    for call in calls:
        await worker.submit(call)
    return [await answer(worker, call) for call in calls]


async def answer(worker: WorkerProcess, call: Call) -> bytes:
    """Wait for an answer, while ranks start and repeat their work."""
    reply = await worker.result(call.seq_id, call.model_id, START_SECONDS)
    assert reply.WhichOneof("state") == "result", reply
    return as_compared(reply)


async def die_in_the_middle_of(worker: WorkerProcess, calls: list[Call], kill: Callable[[int, int], None]) -> None:
    """One rank is stopped, so that the others wait for it in the call, when `kill` gets the worker's process and it."""
    assert worker.process is not None
    rank = children(worker.process.pid, "ray::RankActor")[0]
    os.kill(rank, signal.SIGSTOP)
    for call in calls:
        await worker.submit(call)
    while (await worker.describe()).running_seconds < 0.2:
        await asyncio.sleep(0.05)
    kill(worker.process.pid, rank)
    assert await worker.wait_dead() != 0
    await worker.kill()
    await worker.start()


async def die_while_idle(worker: WorkerProcess) -> None:
    """Kill a rank while idle. The worker notices by itself, before a call."""
    assert worker.process is not None
    os.kill(children(worker.process.pid, "ray::RankActor")[1], signal.SIGKILL)
    assert await worker.wait_dead() != 0
    await worker.kill()
    await worker.start()


def kill_the_rank(worker: int, rank: int) -> None:
    os.kill(rank, signal.SIGKILL)


def kill_the_head(worker: int, rank: int) -> None:
    for program in ("gcs_server", "raylet"):
        for process in children(worker, program):
            _send(process, signal.SIGKILL)
    _send(rank, signal.SIGCONT)


def _send(process: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def children(ancestor: int, program: str) -> list[int]:
    """Return the processes below `ancestor` whose command line holds `program`."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}

    def is_below(process: int) -> bool:
        while process := parents.get(process, 0):
            if process == ancestor:
                return True
        return False

    return sorted(process for process in parents if is_below(process) and program in _command(process))


async def wait_gone(processes: list[int]) -> None:
    """Wait until Ray's processes have ended: within seconds of their worker, and no other worker's."""
    assert processes
    deadline = time.monotonic() + GONE_SECONDS
    while alive := [process for process in processes if _command(process)]:
        if time.monotonic() > deadline:
            raise AssertionError(f"left behind: {[_command(process) for process in alive]}")
        await asyncio.sleep(0.1)


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


async def final_tensors(worker: WorkerProcess) -> dict[str, dict[str, bytes]]:
    """Return the files of the last checkpoints, by model."""
    saved = [event.checkpoint_saved for event in await worker.events() if event.HasField("checkpoint_saved")]
    folders = [(event.model_id, worker.folder / "checkpoints" / event.directory) for event in saved]
    return {model: {file.name: file.read_bytes() for file in path.glob("*.safetensors")} for model, path in folders}


@pytest.mark.timeout(900)
async def test_neither_a_killed_rank_nor_a_killed_head_of_ray_loses_or_doubles_anything(
    tiny_model: Path, tmp_path: Path
) -> None:
    worker = WorkerProcess(tmp_path, (*FLAGS, f"--model={tiny_model}"), start_seconds=START_SECONDS)
    try:
        await worker.start()
        undisturbed = await run(worker, of(UNDISTURBED, [*FIRST_HALF, *SECOND_HALF]))

        disturbed = await run(worker, of(DISTURBED, FIRST_HALF))
        await die_while_idle(worker)
        await die_in_the_middle_of(worker, of(DISTURBED, SECOND_HALF[:3]), kill_the_rank)
        await die_in_the_middle_of(worker, of(DISTURBED, SECOND_HALF[3:]), kill_the_head)
        for call in of(DISTURBED, SECOND_HALF):
            disturbed.append(await answer(worker, call))

        # The first and the last, create and save, name their model.
        assert disturbed[1:-1] == undisturbed[1:-1]
        tensors = await final_tensors(worker)
        assert tensors[DISTURBED] == tensors[UNDISTURBED]
        assert len(tensors[DISTURBED]) == 2
        assert worker.process is not None
        started = children(worker.process.pid, "ray")
        assert await worker.terminate() == 0
        await wait_gone(started)
    finally:
        await worker.kill()
