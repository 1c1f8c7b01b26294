"""A snapshot that cannot be read right gives a model up only when two processes find it so, and never for good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.waiting import until
from support.worker.in_process import Worker
from support.worker.process import MODEL, Call, create, step, train
from tinsmith_rpc import RELEASE_SEQ_ID
from tinsmith_trainer.checkpoints import snapshots
from tinsmith_trainer.disk.durable_files import MemoryFor, ReadFile, read_hashed
from tinsmith_trainer.oplog import tidying
from tinsmith_trainer.training import restoring
from tinsmith_trainer.worker.metrics import WorkerName, describe

from .conftest import StartWorker
from .test_parking import bits
from .test_poorer_starts import crash, reason_to_wait

OTHER = "sess:train:1"
Damage = Callable[[Path], None]

DAMAGES: dict[str, Damage] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-4]) and None,
    "altered": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x7f") and None,
    "gone": lambda path: path.unlink(),
}


@pytest.fixture(params=list(DAMAGES))
def damage(request: pytest.FixtureRequest) -> Damage:
    return DAMAGES[request.param]


def snapshot_of(folder: Path) -> Path:
    [snapshot] = (folder / "volume" / "snapshots").glob("sess.train.0.*")
    return snapshot


def corrupted_in(events: list[object]) -> list[str]:
    return [event.model_corrupted.model_id for event in events if event.HasField("model_corrupted")]  # type: ignore[attr-defined]


async def stopped(start: StartWorker) -> tuple[Worker, dict[str, bytes]]:
    """Two models of which the first has trained, on disk."""
    worker = await start()
    await worker.submit(create(), create(model_id=OTHER), train(1), step(2), train(3))
    await worker.finished(3)
    await worker.finished(0, OTHER)
    expected = bits(worker.engine.state(MODEL))
    await worker.service.drain()
    return worker, expected


async def looked_at(worker: Worker) -> None:
    """Wait until the worker has found the model's snapshot damaged."""
    queue = worker.service.queues.find(MODEL)
    assert queue is not None
    await asyncio.to_thread(until, lambda: bool(queue.held_because) or not queue.is_open)


@pytest.mark.core("durability 6")
async def test_a_model_with_a_damaged_snapshot_waits_and_continues_when_the_next_process_reads_it(
    start: StartWorker, tmp_path: Path, damage: Damage
) -> None:
    """A bad node, a volume that is not mounted, or a bit that flips must not destroy a model."""
    _, expected = await stopped(start)
    path = snapshot_of(tmp_path)
    sound = path.read_bytes()
    damage(path)
    successor = await start()
    await successor.submit(step(4), Call(1, step(1).kind, step(1).payload, OTHER))
    assert (await successor.finished(1, OTHER)).failure is None
    assert "if the next process finds the same, the model is given up" in await reason_to_wait(successor, 4)
    [status] = [one for one in describe(successor.service, WorkerName()).models if one.model_id == MODEL]
    assert status.quarantined
    assert corrupted_in(await successor.events()) == []
    await successor.service.drain()
    path.write_bytes(sound)
    third = await start()
    assert (await third.finished(4)).failure is None
    undisturbed = Worker(tmp_path / "undisturbed")
    await undisturbed.service.activate(1)
    await undisturbed.submit(create(), train(1), step(2), train(3))
    await undisturbed.finished(3)
    assert bits(undisturbed.engine.state(MODEL)) == expected
    await undisturbed.submit(step(4))
    await undisturbed.finished(4)
    assert bits(third.engine.state(MODEL)) == bits(undisturbed.engine.state(MODEL))
    await undisturbed.service.drain()


async def test_a_successful_read_clears_the_damage_that_an_earlier_process_recorded(
    start: StartWorker, tmp_path: Path, damage: Damage
) -> None:
    await stopped(start)
    for seq_id in (4, 5):
        path = snapshot_of(tmp_path)
        sound = path.read_bytes()
        damage(path)
        successor = await start()
        await successor.submit(step(seq_id))
        await reason_to_wait(successor, seq_id)
        await successor.service.drain()
        path.write_bytes(sound)
        successor = await start()
        assert (await successor.finished(seq_id)).failure is None
        assert corrupted_in(await successor.events()) == []
        await successor.service.drain()


async def test_a_snapshot_that_two_processes_find_damaged_corrupts_only_its_model(
    start: StartWorker, tmp_path: Path, damage: Damage
) -> None:
    await stopped(start)
    damage(snapshot_of(tmp_path))
    await looked_at(await start())
    third = await start()
    await third.submit(step(4), Call(1, step(1).kind, step(1).payload, OTHER))
    assert "corrupted" in await third.failure(4)
    assert (await third.finished(1, OTHER)).failure is None
    assert corrupted_in(await third.events()) == [MODEL]


async def test_the_same_process_retries_the_read_and_continues_when_the_file_is_back(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    monkeypatch.setattr(restoring, "DAMAGE_RETRY_SECONDS", 0.02)
    await stopped(start)
    path = snapshot_of(tmp_path)
    sound = path.read_bytes()
    damage(path)
    successor = await start()
    await successor.submit(step(4))
    await reason_to_wait(successor, 4)
    path.with_suffix(".back").write_bytes(sound)
    path.with_suffix(".back").replace(path)
    assert (await successor.finished(4)).failure is None


@pytest.mark.core("durability 5")
async def test_one_bad_read_of_a_sound_snapshot_is_read_again_from_the_disk(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = await stopped(start)
    reads: list[bool] = []

    def flip_unless_from_disk(path: Path, memory_for: MemoryFor, *, from_disk: bool = False) -> ReadFile:
        reads.append(from_disk)
        found = read_hashed(path, memory_for, from_disk=from_disk)
        return found if from_disk else ReadFile(found.content, "0" * 64)

    monkeypatch.setattr(snapshots, "read_hashed", flip_unless_from_disk)
    successor = await start()
    await successor.recovered()
    assert reads[:2] == [False, True]
    assert bits(successor.engine.state(MODEL)) == expected
    assert corrupted_in(await successor.events()) == []


async def test_a_corrupted_model_frees_its_place(start: StartWorker, tmp_path: Path) -> None:
    worker = await start(slots=1, places=1)
    await worker.submit(create(), create(model_id=OTHER))
    await worker.finished(0)
    await worker.service.drain()
    snapshot_of(tmp_path).unlink()
    await looked_at(await start(slots=1, places=1))
    third = await start(slots=1, places=1)
    assert (await third.finished(0, OTHER)).failure is None


# ---- the way back


async def corrupted(start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, object]:
    """Return a model with operations above its snapshot, which two processes have found damaged."""
    worker = await start()
    await worker.submit(create(), train(1), step(2))
    await worker.finished(2)
    await worker.service.snapshot()
    await worker.submit(train(3), step(4))
    await worker.finished(4)
    expected = worker.engine.state(MODEL)
    crash(worker, monkeypatch)
    await worker.service.drain()
    path = snapshot_of(tmp_path)
    sound = path.read_bytes()
    path.write_bytes(sound[:-4])
    await looked_at(await start())
    third = await start()
    await third.submit(train(5))
    assert "corrupted" in await third.failure(5)
    return sound, expected


async def test_a_corrupted_model_with_a_restored_snapshot_leaves_a_checkpoint_of_all_its_work(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, expected = await corrupted(start, tmp_path, monkeypatch)
    monkeypatch.setattr(tidying, "KEEP_ALL_SECONDS", 0.0)
    monkeypatch.setattr(tidying, "KEEP_OPERATIONS", 0)
    worker = await start()
    await worker.service.tidy()  # which forgets nothing that brings it back
    await worker.service.drain()
    snapshot_of(tmp_path).write_bytes(sound)
    successor = await start()
    assert (await successor.finished(RELEASE_SEQ_ID)).failure is None
    [saved] = [event.checkpoint_saved for event in await successor.events() if event.HasField("checkpoint_saved")]
    assert (saved.model_id, saved.name) == (MODEL, restoring.RECOVERED_NAME)
    read = successor.service.parts.checkpoints.read(
        saved.directory, saved.manifest_digest, successor.engine.base_model()
    )
    wanted = {name: bytes_ for name, bytes_ in bits(expected).items() if not name.startswith("gradients")}  # type: ignore[arg-type]
    assert bits(read.state) == wanted
    assert "corrupted" in await successor.failure(5)  # as its client has read
    assert not list((tmp_path / "volume" / "snapshots").glob("sess.train.0.*"))


async def test_a_corrupted_model_is_forgotten_with_its_snapshot_once_its_results_would_be(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await corrupted(start, tmp_path, monkeypatch)
    worker = await start()
    monkeypatch.setattr(tidying, "KEEP_RESULTS_SECONDS", -1.0)
    for _ in range(2):
        await worker.service.tidy()
    assert MODEL not in [queue.model_id for queue in worker.service.queues.all()]
    assert not list((tmp_path / "volume" / "snapshots").glob("sess.train.0.*"))
