"""A worker on a real disk that is full: it loses nothing, serves what needs no room, and recovers with free space."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from support.engine.heavy import HEAVY_BYTES, HeavyEngine, create_heavy
from support.small_disk import MIB, SmallDisk, on_small_disk
from support.worker.in_process import Worker
from support.worker.process import MODEL, Call, WorkerProcess, create, save, step, train
from tinsmith_rpc import RELEASE_SEQ_ID, worker_pb2
from tinsmith_trainer.errors import JournalFull
from tinsmith_trainer.training import retries
from tinsmith_trainer.training.residency import ResidencyRules
from tinsmith_trainer.worker import admission

OTHER = "sess:train:1"
DISK_MIB, RESERVE_MIB, HEAVY_MIB = 96, 16, 32
AT_ONCE = ResidencyRules(idle_seconds=0.0, turn_seconds=0.0, exchange_share=0.0)
RELEASE = Call(RELEASE_SEQ_ID, worker_pb2.RELEASE_MODEL, b"")
PROGRAM = [train(1), step(2), train(3, (2, 7, 1)), step(4)]
LAST = 4


def load(seq_id: int, saved: worker_pb2.CheckpointSaved) -> Call:
    request = worker_pb2.LoadWeights(
        tinker_path="tinker://before", directory=saved.directory, manifest_digest=saved.manifest_digest
    )
    return Call(seq_id, worker_pb2.LOAD_WEIGHTS, request.SerializeToString())


def release_after_save(name: str) -> Call:
    final = worker_pb2.SaveWeights(kind=worker_pb2.TRAINING, name=name)
    return replace(RELEASE, payload=worker_pb2.ReleaseModel(final_checkpoint=final).SerializeToString())


def of(model_id: str, calls: Sequence[Call]) -> list[Call]:
    return [replace(call, model_id=model_id) for call in calls]


@asynccontextmanager
async def worker_on(disk: SmallDisk, *, checkpoints: Path | None = None, slots: int = 8) -> AsyncIterator[Worker]:
    worker = Worker(
        disk.folder,
        engine=HeavyEngine(adapter_slots=slots, heavy_bytes=HEAVY_MIB * MIB),
        residency=AT_ONCE,
        reserved_bytes=RESERVE_MIB * MIB,
        checkpoints=f"file://{checkpoints}" if checkpoints is not None else None,
    )
    worker.service.parts.volume.room.keep_reserve()
    await worker.service.activate(1)
    try:
        yield worker
    finally:
        await worker.service.drain()


async def finished(worker: Worker, calls: Sequence[Call]) -> list[bytes | None]:
    await worker.submit(*calls)
    results = [await worker.finished(call.seq_id, call.model_id) for call in calls]
    assert all(result.failure is None for result in results), results
    return [result.payload for result in results]


async def reason_of_waiting(worker: Worker, call: Call) -> str:
    while not (pending := worker.service.pending(call.model_id, call.seq_id)).paused_capacity:
        assert await worker.is_pending(call.seq_id, call.model_id)
    return pending.reason


def tensors(worker: Worker, model_id: str = MODEL) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in worker.engine.state(model_id).tensors.items()}


async def undisturbed(folder: Path, calls: Sequence[Call]) -> tuple[list[bytes | None], dict[str, bytes]]:
    worker = Worker(folder, engine=HeavyEngine(heavy_bytes=HEAVY_MIB * MIB))
    await worker.service.activate(1)
    found = await finished(worker, calls), tensors(worker)
    await worker.service.drain()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of the small disk."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def test_a_model_that_cannot_be_kept_waits_with_a_reason_while_others_train_and_are_released(
    folder: Path, tmp_path: Path
) -> None:
    async def scenario(disk: SmallDisk) -> None:
        heavy = create_heavy(MODEL)
        expected = await undisturbed(tmp_path / "undisturbed", [heavy, *PROGRAM])
        async with worker_on(disk) as worker:
            await finished(worker, [create(model_id=OTHER)])
            disk.fill(leaving_bytes=(RESERVE_MIB + HEAVY_MIB // 2) * MIB)
            free = disk.free_bytes
            await worker.submit(heavy)
            assert "no room for a snapshot of sess:train:0, which takes 32.0 MiB" in await reason_of_waiting(
                worker, heavy
            )
            await finished(worker, of(OTHER, PROGRAM))
            await finished(worker, of(OTHER, [RELEASE]))
            assert disk.leftovers() == []
            assert disk.free_bytes > free - MIB
            assert worker.service.pending(MODEL, 0).paused_capacity
            disk.make_room()
            assert await finished(worker, [heavy, *PROGRAM]) == expected[0]
            assert tensors(worker) == expected[1]

    on_small_disk(folder, DISK_MIB, scenario)


def test_a_load_that_cannot_be_kept_is_taken_back_and_done_once_there_is_room(folder: Path, tmp_path: Path) -> None:
    async def scenario(disk: SmallDisk) -> None:
        async with worker_on(disk, checkpoints=tmp_path / "root") as worker:
            await finished(worker, [create_heavy(MODEL), train(1), step(2), save(3, "before")])
            saved = tensors(worker)
            [event] = [each.checkpoint_saved for each in await worker.events() if each.HasField("checkpoint_saved")]
            await finished(worker, [train(4, (2, 7, 1)), step(5), train(6)])
            before = tensors(worker)
            disk.fill(leaving_bytes=(RESERVE_MIB + HEAVY_MIB // 2) * MIB)
            loading = load(7, event)
            await worker.submit(loading)
            assert "no room for a snapshot" in await reason_of_waiting(worker, loading)
            assert tensors(worker) == before != saved
            disk.make_room()
            assert (await worker.finished(7)).failure is None
            weights = {name for name in saved if name.startswith("weights/")}
            assert {name: tensors(worker)[name] for name in weights} == {name: saved[name] for name in weights}

    on_small_disk(folder, DISK_MIB, scenario)


def test_an_adapter_that_cannot_be_parked_keeps_its_slot_and_a_parked_one_can_be_released(
    folder: Path, tmp_path: Path
) -> None:
    async def scenario(disk: SmallDisk) -> None:
        heavy, third = [create_heavy(MODEL), *PROGRAM], "sess:train:2"
        expected = await undisturbed(tmp_path / "undisturbed", heavy)
        async with worker_on(disk, slots=1) as worker:
            await finished(worker, [create(model_id=OTHER)])
            results = await finished(worker, heavy[:3])
            disk.fill(leaving_bytes=(RESERVE_MIB + HEAVY_MIB // 2) * MIB)
            free = disk.free_bytes
            await worker.submit(create(model_id=third))
            reason = await reason_of_waiting(worker, create(model_id=third))
            assert "its volume has no room for the snapshot" in reason
            assert MODEL not in reason
            await finished(worker, of(OTHER, [RELEASE]))
            assert disk.leftovers() == []
            assert disk.free_bytes > free - MIB
            disk.make_room()
            assert (await worker.finished(0, third)).failure is None
            assert (results + await finished(worker, heavy[3:]), tensors(worker)) == expected

    on_small_disk(folder, DISK_MIB, scenario)


def test_a_create_that_waits_for_room_takes_no_slot_from_an_idle_adapter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "ROOM_RETRY_SECONDS", 0.01)

    async def scenario(disk: SmallDisk) -> None:
        async with worker_on(disk, slots=1) as worker:
            await finished(worker, [create(model_id=OTHER)])
            disk.fill(leaving_bytes=(RESERVE_MIB + HEAVY_MIB // 2) * MIB)
            await worker.submit(create_heavy(MODEL))
            await reason_of_waiting(worker, create_heavy(MODEL))
            await finished(worker, of(OTHER, [train(1)]))
            queue = worker.service.queues.find(MODEL)
            assert queue is not None
            for _ in range(3):
                tried = queue.held_until
                while queue.held_until in (tried, 0.0):
                    await asyncio.sleep(0.001)
            parking = worker.service.scheduler.parking
            assert (parking.figures.evicted, parking.figures.restored) == (1, 1)
            disk.make_room()
            assert (await worker.finished(0)).failure is None

    on_small_disk(folder, DISK_MIB, scenario)


def test_a_snapshot_on_request_says_that_there_is_no_room_and_a_later_one_works(folder: Path) -> None:
    async def scenario(disk: SmallDisk) -> None:
        async with worker_on(disk) as worker:
            await finished(worker, [create_heavy(MODEL), *PROGRAM])
            disk.fill(leaving_bytes=(RESERVE_MIB + HEAVY_MIB // 2) * MIB)
            with pytest.raises(JournalFull, match="make room"):
                await worker.service.snapshot()
            assert disk.leftovers() == []
            disk.make_room()
            assert await worker.service.snapshot() > 0

    on_small_disk(folder, DISK_MIB, scenario)


def test_bodies_that_come_at_once_leave_the_reserve_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BACKLOG_DELAY_SECONDS", 0.0)

    async def scenario(disk: SmallDisk) -> None:
        async with worker_on(disk) as worker:
            await finished(worker, [create()])
            waiting = [Call(seq_id, worker_pb2.FORWARD_BACKWARD, bytes(5 * MIB)) for seq_id in range(2, 12)]
            refused = await refusals(worker, waiting)
            assert 0 < len(refused) < len(waiting)
            await worker.submit(train(1))  # only now do they run
            while refused:
                assert worker.service.parts.volume.room.has_room_for(0)
                refused = await refusals(worker, refused)
            for call in waiting:
                assert "user:" in await worker.failure(call.seq_id)  # they are no bodies of the protocol

    on_small_disk(folder, DISK_MIB, scenario)


async def refusals(worker: Worker, calls: Sequence[Call]) -> list[Call]:
    """Submit all of them at once, and return those for which there was no room."""
    outcomes = await asyncio.gather(*(worker.submit(call) for call in calls), return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, JournalFull) for outcome in outcomes), outcomes
    return [call for call, outcome in zip(calls, outcomes, strict=True) if outcome is not None]


def test_a_tenant_with_waiting_operations_leaves_room_to_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BACKLOG_DELAY_SECONDS", 0.0)

    async def scenario(disk: SmallDisk) -> None:
        async with worker_on(disk) as worker:
            accepted: list[str] = []

            async def send(model_id: str, tenant: str) -> None:
                """Send operations that wait for a number that does not come."""
                await worker.submit(create(model_id=model_id), tenant=tenant)
                for seq_id in range(2, 100):
                    call = Call(seq_id, worker_pb2.FORWARD_BACKWARD, bytes(4 * MIB), model_id)
                    await worker.submit(call, tenant=tenant)
                    accepted.append(tenant)

            for model_id, tenant in ((MODEL, "first"), (OTHER, "second")):
                with pytest.raises(JournalFull, match="this tenant"):
                    await send(model_id, tenant)
            assert accepted.count("first") > accepted.count("second") > 1
            # What they wait for comes in all the same: all of them run, and give their room back.
            await worker.submit(Call(1, worker_pb2.FORWARD_BACKWARD, bytes(4 * MIB), MODEL), tenant="first")
            await worker.finished(1 + accepted.count("first"))

    on_small_disk(folder, DISK_MIB, scenario)


def test_a_save_that_finds_no_room_says_so_leaves_nothing_and_is_done_once_there_is_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RELEASE_RETRY_SECONDS", 0.05)

    async def scenario(disk: SmallDisk) -> None:
        async with worker_on(disk) as worker:
            await finished(worker, [create_heavy(MODEL), train(1), step(2), create(model_id=OTHER)])
            disk.fill(leaving_bytes=HEAVY_MIB // 2 * MIB)
            await worker.submit(release_after_save("end"))
            await finished(worker, of(OTHER, PROGRAM))
            reason = await reason_of_waiting(worker, release_after_save("end"))
            assert "could not be saved" in reason
            assert "No space left on device: delete checkpoints, or make room" in reason
            assert not list(disk.folder.glob("checkpoints/*/*/*/*"))
            disk.make_room()
            assert (await worker.finished(RELEASE_SEQ_ID)).failure is None
            files = list(disk.folder.glob("checkpoints/*/*/*/*"))
            assert len(files) == 4
            assert {file.stat().st_mode & 0o777 for file in files} == {0o444}

    on_small_disk(folder, DISK_MIB, scenario)


def test_a_process_on_a_disk_without_a_byte_answers_releases_ends_and_starts_again(folder: Path) -> None:
    async def scenario(disk: SmallDisk) -> None:
        flags = ("--engine=support.engine.heavy:build_heavy", f"--reserved-bytes={RESERVE_MIB * MIB}")
        process = WorkerProcess(disk.folder, flags, {HEAVY_BYTES: str(HEAVY_MIB * MIB)})
        try:
            await process.start()
            for call in [create(), *PROGRAM, create(model_id=OTHER)]:
                await process.submit(call)
            answers = [await process.result(call.seq_id) for call in PROGRAM]
            disk.fill(leaving_bytes=8 * MIB)
            await process.submit(create_heavy("sess:train:2"))
            while not (await process.result(0, "sess:train:2", timeout=0.05)).pending.paused_capacity:
                pass
            disk.fill()
            assert await process.terminate() == 0
            # It has the name that no create of this journal writes under: one is tried again at the start.
            left = disk.folder / "volume" / "snapshots" / ".sess.train.9.0.safetensors.tmp"
            left.touch()
            await process.start()
            assert not left.exists()
            assert [await process.result(call.seq_id) for call in PROGRAM] == answers
            await process.submit(replace(RELEASE, model_id=OTHER))
            assert (await process.result(RELEASE_SEQ_ID, OTHER)).HasField("result")
            disk.make_room()
            assert (await process.result(0, "sess:train:2")).HasField("result")
        finally:
            await process.kill()

    on_small_disk(folder, DISK_MIB, scenario)


def test_a_start_on_a_full_disk_reports_it_and_continues_when_space_is_free(folder: Path) -> None:
    async def scenario(disk: SmallDisk) -> None:
        process = WorkerProcess(disk.folder, ("--reserved-bytes=0",))
        try:
            await process.start()
            await process.submit(create())
            assert (await process.result(0)).HasField("result")
            await process.terminate()
            disk.fill()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await process.start()
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "make room" in (refused.value.details() or "")
            disk.make_room()
            await process.rpc.Activate(worker_pb2.ActivateRequest(epoch=process.epoch))
            await process.submit(train(1))
            assert (await process.result(1)).HasField("result")
        finally:
            await process.kill()

    on_small_disk(folder, DISK_MIB, scenario)
