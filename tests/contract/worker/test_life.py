"""A worker's life: fences, full disks, releases, corruption, restarts."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.worker.in_process import Worker
from support.worker.process import AWAIT_SECONDS, MODEL, Call, create, save, save_ephemeral, step, train
from tinsmith_rpc import RELEASE_SEQ_ID, worker_pb2
from tinsmith_trainer.checkpoints.snapshots import SnapshotFolder
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.errors import Draining, JournalFull, ModelChanged
from tinsmith_trainer.oplog import tidying
from tinsmith_trainer.oplog.journal_tables import OperationResult, read_result
from tinsmith_trainer.oplog.model_queues import ModelQueues
from tinsmith_trainer.oplog.result_tables import forget_events
from tinsmith_trainer.training import retries
from tinsmith_trainer.worker.metrics import WorkerName, describe
from tinsmith_trainer.worker.service import NotActive

from .conftest import StartWorker


def release(final: str | None = None, model_id: str = MODEL, reason: str = "") -> Call:
    request = worker_pb2.ReleaseModel(reason=reason)
    if final is not None:
        request.final_checkpoint.kind, request.final_checkpoint.name = worker_pb2.TRAINING, final
    return Call(RELEASE_SEQ_ID, worker_pb2.RELEASE_MODEL, request.SerializeToString(), model_id)


@pytest.mark.core("durability 8")
async def test_an_older_epoch_is_fenced_out(worker: Worker) -> None:
    await worker.submit(create())
    await worker.service.activate(5)
    with pytest.raises(NotActive, match="epoch 4"):
        await worker.service.activate(4)
    stale = worker_pb2.SubmitRequest(epoch=1, model_id=MODEL, seq_id=1, kind=worker_pb2.FORWARD_BACKWARD)
    with pytest.raises(NotActive):
        await worker.service.submit(stale)


@pytest.mark.core("durability 2")
async def test_a_full_volume_refuses_before_it_acknowledges(start: StartWorker) -> None:
    worker = await start(reserved_bytes=2**60)
    with pytest.raises(JournalFull, match="make room"):
        await worker.submit(create())
    assert worker.service.queues.find(MODEL) is None


async def test_a_worker_says_what_is_free_on_its_volume_and_whether_it_is_full(start: StartWorker) -> None:
    roomy = describe((await start()).service, WorkerName())
    assert (roomy.volume_free_bytes > 0, roomy.volume_full) == (True, False)
    full = describe((await start(reserved_bytes=2**60)).service, WorkerName())
    assert (full.HasField("volume_free_bytes"), full.volume_full) == (True, True)


async def test_a_worker_is_idle_only_while_no_operation_waits(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create())
    await worker.finished(0)
    assert describe(worker.service, WorkerName()).idle_seconds > 0
    await worker.submit(train(2))
    assert describe(worker.service, WorkerName()).idle_seconds == 0


async def test_a_full_volume_takes_the_release_that_empties_it(start: StartWorker, tmp_path: Path) -> None:
    worker = await start()
    await worker.submit(create(), train(1), step(2))
    await worker.finished(2)
    full = await start(reserved_bytes=2**60)
    with pytest.raises(JournalFull):
        await full.submit(train(3))
    await full.submit(release(final="autosave"))
    assert (await full.finished(RELEASE_SEQ_ID)).failure is None
    assert not list((tmp_path / "volume" / "snapshots").iterdir())
    assert [event.checkpoint_saved.name for event in await full.events() if event.HasField("checkpoint_saved")] == [
        "autosave"
    ]


@pytest.mark.core("durability 6")
async def test_results_exist_after_a_restart(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create(), train(1), step(2))
    before = [await worker.finished(seq_id) for seq_id in (0, 1, 2)]
    successor = await start()
    assert [await successor.finished(seq_id) for seq_id in (0, 1, 2)] == before


async def test_a_clean_stop_leaves_nothing_to_replay(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create(), train(1), step(2))
    await worker.finished(2)
    expected = worker.engine.state(MODEL).tensors
    successor = await start()
    await successor.recovered()
    line = successor.service.queues.find(MODEL)
    assert line is not None
    assert line.snapshot_applied == 2
    assert {name: value.tobytes() for name, value in successor.engine.state(MODEL).tensors.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


async def test_a_released_model_frees_its_place_and_keeps_its_results(start: StartWorker) -> None:
    worker = await start(slots=1, places=1)
    other = "sess:train:1"
    await worker.submit(create(), train(1), step(2), create(model_id=other))
    await worker.finished(2)
    assert await worker.is_pending(0, other)
    pending = worker.service.pending(other, 0)
    assert pending.paused_capacity
    assert "all 1 places" in pending.reason
    await worker.submit(release())
    assert (await worker.finished(0, other)).failure is None
    assert (await worker.finished(1)).failure is None


async def test_a_checkpoint_above_the_workers_rank_is_refused(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create(), save(1, "wide"))
    await worker.finished(1)
    [saved] = [event.checkpoint_saved for event in await worker.events() if event.HasField("checkpoint_saved")]
    successor = await start(max_rank=2)
    load = worker_pb2.LoadWeights(
        tinker_path="tinker://wide", directory=saved.directory, manifest_digest=saved.manifest_digest, create=True
    )
    other = "sess:train:1"
    await successor.submit(Call(0, worker_pb2.LOAD_MODEL, load.SerializeToString(), other))
    assert await successor.failure(0, other) == (
        "user: tinker://wide holds a LoRA adapter of rank 4; this worker's limit is 2, its max_rank."
    )


@pytest.mark.parametrize(("final", "reason"), [(None, ""), (None, "It was deleted."), ("autosave", "It was deleted.")])
async def test_work_for_a_released_model_fails_with_a_message(worker: Worker, final: str | None, reason: str) -> None:
    await worker.submit(create(), release(final, reason=reason))
    await worker.finished(RELEASE_SEQ_ID)
    await worker.submit(train(1))
    assert (reason or "released when its session ended") in await worker.failure(1)
    released = [event.model_released for event in await worker.events() if event.HasField("model_released")]
    assert [one.reason for one in released] == [reason]


async def test_a_create_that_fails_is_one_failure_and_leaves_no_place_taken(start: StartWorker) -> None:
    worker = await start(slots=1, places=1)
    lora = worker_pb2.LoraConfig(rank=999, alpha=32.0, seed=1)
    bad = Call(0, worker_pb2.CREATE_MODEL, worker_pb2.CreateModel(lora=lora).SerializeToString(), "sess:train:9")
    await worker.submit(bad, Call(1, worker_pb2.OPTIM_STEP, step(1).payload, "sess:train:9"))
    assert "rank 999" in await worker.failure(0, "sess:train:9")
    assert "could not be created" in await worker.failure(1, "sess:train:9")
    await worker.submit(create())
    assert (await worker.finished(0)).failure is None


async def test_other_base_weights_are_refused_while_models_depend_on_the_old(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create())
    await worker.finished(0)
    with pytest.raises(ModelChanged, match="Put the old files back"):
        await start(seed=1)


async def test_events_come_once_in_order_with_their_epoch(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create(), save(1, "a"), save_ephemeral(2))
    await worker.finished(2)
    events = await worker.events()
    assert [event.WhichOneof("what") for event in events] == ["model_created", "checkpoint_saved", "checkpoint_saved"]
    ids = [event.event_id for event in events]
    assert ids == [ids[0], ids[0] + 1, ids[0] + 2]
    assert {event.epoch for event in events} == {1}
    assert await worker.events(after=ids[2]) == []


async def test_events_of_a_new_journal_come_after_every_cursor_of_a_lost_one(tmp_path: Path) -> None:
    ids = []
    for name in ("lost", "new"):
        worker = Worker(tmp_path / name)
        await worker.service.activate(1)
        await worker.submit(create(), save(1, "a"))
        await worker.finished(1)
        ids.append([event.event_id for event in await worker.events()])
        await worker.service.drain()
    assert max(ids[0]) < min(ids[1])


async def test_a_cursor_of_another_volume_forgets_no_event(worker: Worker) -> None:
    await worker.submit(create())
    await worker.finished(0)
    [event] = await worker.events()
    worker.service.journal.write(lambda db: forget_events(db, event.event_id + 1000)).result()
    assert [kept.event_id for kept in await worker.events()] == [event.event_id]
    worker.service.journal.write(lambda db: forget_events(db, event.event_id)).result()
    assert await worker.events() == []


async def test_a_release_waits_until_its_last_checkpoint_is_safe(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage is away for a moment: the model keeps its place and its work, and leaves when storage is back."""
    monkeypatch.setattr(retries, "RELEASE_RETRY_SECONDS", 0.05)
    worker = await start(slots=1)
    await worker.submit(create(), train(1), step(2))
    await worker.finished(2)
    (tmp_path / "checkpoints").write_text("no folder")
    await worker.submit(release(final="autosave"))
    assert await worker.is_pending(RELEASE_SEQ_ID)
    (tmp_path / "checkpoints").unlink()
    assert (await worker.finished(RELEASE_SEQ_ID)).failure is None
    assert [event.checkpoint_saved.name for event in await worker.events() if event.HasField("checkpoint_saved")] == [
        "autosave"
    ]


async def test_a_worker_ends_when_its_engine_thread_fails(
    worker: Worker, ended: Future[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(lines: ModelQueues) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(ModelQueues, "wait_for_turns", fail)
    await worker.submit(create())
    assert await asyncio.wait_for(asyncio.wrap_future(ended), AWAIT_SECONDS) == 1


async def test_a_worker_forgets_nothing_before_its_first_activation(
    start: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start()
    await worker.submit(create(), release())
    await worker.finished(RELEASE_SEQ_ID)
    await worker.service.drain()
    monkeypatch.setattr(tidying, "KEEP_RESULTS_SECONDS", -1.0)
    successor = Worker(tmp_path)
    await successor.service.tidy()
    await successor.service.activate(2)
    assert [line.model_id for line in successor.service.queues.all()] == [MODEL]
    await successor.service.tidy()
    assert successor.service.queues.all() == []
    await successor.service.drain()


async def test_a_worker_on_its_way_out_is_not_activated(tmp_path: Path) -> None:
    """It would read a journal that is about to close."""
    worker = Worker(tmp_path)
    await worker.service.drain()
    with pytest.raises(Draining):
        await worker.service.activate(1)


async def test_a_worker_that_cannot_publish_a_result_ends(
    worker: Worker, ended: Future[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a made-up fault")

    monkeypatch.setattr(ModelQueues, "publish", fail)
    await worker.submit(create())
    assert await asyncio.wait_for(asyncio.wrap_future(ended), AWAIT_SECONDS) == 1


async def test_a_worker_that_cannot_take_its_journal_over_ends(
    tmp_path: Path, ended: Future[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: SnapshotFolder) -> float:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(SnapshotFolder, "newest_written_at", fail)
    worker = Worker(tmp_path)
    await worker.service.activate(1)
    assert ended.result(0) == 1
    await worker.service.drain()


async def test_a_failed_last_snapshot_of_one_model_does_not_affect_other_models(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start()
    other = "sess:train:1"
    await worker.submit(create(), create(model_id=other), train(1), replace(step(1), model_id=other))
    await worker.finished(1)
    await worker.finished(1, other)
    state = worker.engine.state

    def fail_for_the_first(adapter_id: str) -> AdapterState:
        if adapter_id == MODEL:
            raise RuntimeError("the device is gone")
        return state(adapter_id)

    monkeypatch.setattr(worker.engine, "state", fail_for_the_first)
    successor = await start()
    await successor.recovered()
    applied = {line.model_id: line.snapshot_applied for line in successor.service.queues.all()}
    assert (applied[MODEL], applied[other]) == (0, 1)


async def cancelled_after(steps: int, call: Coroutine[Any, Any, object]) -> None:
    """Cancel a call as gRPC does when its client dies, after this many steps of the loop."""
    task = asyncio.create_task(call)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("steps", range(6))
async def test_calls_of_clients_that_die_change_nothing_for_other_clients(tmp_path: Path, steps: int) -> None:
    worker = Worker(tmp_path)
    await cancelled_after(steps, worker.service.activate(1))
    await worker.service.activate(1)
    for call in (create(), train(1), step(2), save(3, "a")):
        await cancelled_after(steps, worker.submit(call))
        await cancelled_after(steps, worker.service.wait_for(MODEL, call.seq_id, 5))
        await cancelled_after(steps, worker.service.events(0, 5))
        await cancelled_after(steps, worker.service.tidy())
        await worker.submit(call)
        assert (await worker.finished(call.seq_id)).failure is None
    saved = [event for event in await worker.events() if event.HasField("checkpoint_saved")]
    assert len(saved) == 1
    await worker.service.drain()


async def test_a_result_is_not_declared_unknown_before_the_journal_was_read(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    with pytest.raises(NotActive):
        await worker.service.wait_for(MODEL, 0, 0)
    await worker.service.drain()


async def test_results_are_forgotten_after_their_time_and_said_to_be_gone(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.submit(create(), train(1))
    await worker.finished(1)
    monkeypatch.setattr(tidying, "KEEP_RESULTS_SECONDS", -1.0)
    await worker.service.tidy()
    assert worker.service.journal.read(lambda db: read_result(db, MODEL, 1)).result() == OperationResult(
        None, True, event_id=0
    )
    await worker.submit(step(2))
    assert (await worker.finished(2)).failure is None


async def test_a_released_model_is_forgotten_when_its_results_are(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start()
    await worker.submit(create(), train(1), release())
    await worker.finished(RELEASE_SEQ_ID)
    await worker.service.tidy()
    assert (await worker.finished(1)).failure is None
    monkeypatch.setattr(tidying, "KEEP_RESULTS_SECONDS", -1.0)
    await worker.service.tidy()
    assert worker.service.queues.all() == []
    assert (await start()).service.queues.all() == []


async def test_a_worker_that_no_server_has_found_yet_does_not_say_that_it_is_empty(
    start: StartWorker, tmp_path: Path
) -> None:
    """A session that is deleted with its volume goes as soon as its worker holds no adapter."""
    worker = await start()
    await worker.submit(create(), create(model_id="sess:train:1"), release(model_id="sess:train:1"))
    await worker.finished(RELEASE_SEQ_ID, "sess:train:1")
    await worker.service.drain()
    successor = Worker(tmp_path)
    assert describe(successor.service, WorkerName()).adapters_used == 1
    await successor.service.activate(2)
    assert describe(successor.service, WorkerName()).adapters_used == 1
    await successor.service.drain()


async def test_a_reaped_model_leaves_a_checkpoint(worker: Worker) -> None:
    await worker.submit(create(), train(1), step(2), release(final="autosave"))
    await worker.finished(RELEASE_SEQ_ID)
    saved = [event.checkpoint_saved for event in await worker.events() if event.HasField("checkpoint_saved")]
    assert [(event.name, event.kind) for event in saved] == [("autosave", worker_pb2.TRAINING)]


@pytest.mark.core("durability 8")
async def test_the_epoch_outlives_the_process(start: StartWorker) -> None:
    """Otherwise an older server could drive the successor."""
    worker = await start()
    await worker.service.activate(7)
    with pytest.raises(NotActive, match="epoch 7"):
        await start()


async def test_the_higher_epoch_wins_over_an_activation_at_the_same_time(worker: Worker) -> None:
    outcomes = await asyncio.gather(worker.service.activate(5), worker.service.activate(4), return_exceptions=True)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], NotActive)
    assert worker.service.epoch == 5


@pytest.mark.core("durability 3")
async def test_the_end_of_a_session_closes_its_gaps(worker: Worker) -> None:
    await worker.submit(create(), train(2), release())
    assert (await worker.finished(2)).failure is None


async def test_a_quantized_base_model_is_refused_while_models_depend_on_the_whole_one(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create())
    await worker.finished(0)
    with pytest.raises(ModelChanged, match="without --quantization, and this worker has it with --quantization 4bit"):
        await start(quantization="4bit")


async def test_other_base_weights_are_accepted_when_no_model_depends_on_the_old_ones(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create(), release())
    await worker.finished(RELEASE_SEQ_ID)
    await start(seed=1)
