"""Saves for sampling: in shared memory with their result, and longer than the worker in a sampler's."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.engine.reference import ReferenceEngine
from support.worker.process import WorkerProcess, create, save, save_ephemeral, step, train
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.checkpoints.shared_saves import fetch_save
from tinsmith_trainer.engines.base import AdapterState

from .test_parking import bits

BASE = ReferenceEngine().base_model()


@pytest.fixture
async def sharing(tmp_path: Path) -> AsyncIterator[tuple[WorkerProcess, Path]]:
    """Return a worker, and its socket for saves, whose path is short."""
    with tempfile.TemporaryDirectory() as folder:
        door = Path(folder, "saves")
        worker = WorkerProcess(tmp_path, flags=("--no-sampling", "--saves-socket", str(door)))
        await worker.start()
        yield worker, door
        await worker.kill()


async def saved(worker: WorkerProcess, after: int = 0) -> list[worker_pb2.CheckpointSaved]:
    return [event.checkpoint_saved for event in await worker.events(after) if event.HasField("checkpoint_saved")]


def shared(door: Path, checkpoint: worker_pb2.CheckpointSaved) -> AdapterState | None:
    return fetch_save(door, checkpoint.manifest_digest, BASE.revision)


async def test_saves_to_sample_from_are_shared_until_the_worker_is_killed_and_then_on_the_root_alone(
    sharing: tuple[WorkerProcess, Path],
) -> None:
    worker, door = sharing
    for call in (create(), train(1), step(2), save(3, "a"), save_ephemeral(4)):
        await worker.submit(call)
    await worker.result(4)
    training, ephemeral = await saved(worker)
    assert shared(door, training) is None
    taken = shared(door, ephemeral)
    await worker.kill()
    assert shared(door, ephemeral) is None
    root = CheckpointRoot(f"file://{worker.folder / 'checkpoints'}")
    read = root.read(ephemeral.directory, ephemeral.manifest_digest, BASE).state
    assert taken is not None
    assert bits(taken) == bits(read)

    await worker.start()
    assert shared(door, ephemeral) is None
    await worker.submit(save_ephemeral(5))
    await worker.result(5)
    assert shared(door, (await saved(worker))[-1]) is not None
    assert await worker.terminate() == 0
    assert not door.exists()
