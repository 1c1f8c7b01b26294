"""An operation that ends every process that runs it: it fails after three, and everything else continues.

Each life of the worker is a real process, and the engine ends it in the middle of a call. Other operations and other
models must have the results, bit for bit, of a run in which that operation failed for another reason.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from support.client.sdk import adam, next_token_datum, service_client
from support.engine.deadly import (
    BAD_DISK,
    DEADLY_RATE,
    DEADLY_SEED,
    ENDS,
    EXITS,
    FOLDER_VARIABLE,
    HANGS,
    HUNG,
    KILLS,
    REFUSED,
)
from support.server.serve_process import REFERENCE_MODEL, ServedInstallation
from support.worker.process import MODEL, Call, WorkerProcess, broken_train, create, save, step, train
from support.worker.restarts import Lives
from tinker import RequestFailedError
from tinsmith_rpc import worker_pb2

OTHER = "sess:train:1"
ENGINE = "--engine=support.engine.deadly:build_deadly"
ONE_ATTEMPT = "--attempts-per-operation=1"
NO_SNAPSHOTS = "--snapshot-replay-seconds=1000"
DEADLY = train(3, (KILLS, 2, 6))


@pytest.fixture
def deadly(tmp_path: Path) -> Path:
    """Return a folder: the engine dies at what a file in it names."""
    folder = tmp_path / "deadly"
    folder.mkdir()
    return folder


@asynccontextmanager
async def worker(folder: Path, *flags: str, **environment: str) -> AsyncIterator[Lives]:
    folder.mkdir(exist_ok=True)
    process = WorkerProcess(folder, (ENGINE, *flags), environment)
    try:
        await process.start()
        yield Lives(process)
    finally:
        await process.kill()


def program(third: Call) -> list[Call]:
    """Two models whose operations take turns; of the other one, the third is sound."""
    after = [step(4), train(5, (9, 2, 6)), step(6), save(7, "final")]
    mine, others = ([create(), train(1), step(2), third, *after] for third in (third, train(3, (5, 3, 5))))
    return [
        call for pair in zip(mine, (replace(call, model_id=OTHER) for call in others), strict=True) for call in pair
    ]


@pytest.mark.core("durability 13")
async def test_it_fails_after_three_and_all_else_ends_as_if_it_had_failed_by_itself(tmp_path: Path) -> None:
    async with worker(tmp_path / "undisturbed") as lives:
        await lives.run(program(broken_train(3)))
        assert lives.ended == 0
        expected = [lives.results(model) for model in (MODEL, OTHER)]
        expected_files = [await lives.saved_files(model) for model in (MODEL, OTHER)]
    async with worker(tmp_path / "disturbed") as lives:
        await lives.run(program(DEADLY))
        assert lives.ended == 3
        described = await lives.worker.describe()
        assert described.metrics.operations_given_up == 1
        assert lives.answers[MODEL, 3].failure.category == worker_pb2.SERVER
        assert lives.failure(3, MODEL) == (
            "forward_backward 3 was given up: the worker's process ended 3 times (the last sign: none, "
            "as when the system kills a process for lack of memory) while it ran. It was not applied; "
            "later operations continue. Send fewer or shorter datums in a call, or give the worker more memory."
        )
        assert "forward_backward 3 was given up" in lives.failure(4, MODEL)  # the step that its gradient misses
        mine, others = (lives.results(model) for model in (MODEL, OTHER))
        assert others == expected[1]
        assert {n: mine[n] for n in mine if n not in (3, 4)} == {n: expected[0][n] for n in mine if n not in (3, 4)}
        assert [await lives.saved_files(model) for model in (MODEL, OTHER)] == expected_files
        assert await lives.worker.terminate() == 0


async def test_its_failure_is_replayed_as_any_other_without_reading_it_again(tmp_path: Path) -> None:
    async with worker(tmp_path, ONE_ATTEMPT, NO_SNAPSHOTS) as lives:
        await lives.run(program(DEADLY)[:8])
        before = lives.results(MODEL)
        await lives.worker.kill()
        await lives.run([step(4)])
        assert "forward_backward 3 was given up" in lives.failure(4, MODEL)
        assert (lives.ended, lives.results(MODEL)) == (1, before | {4: lives.results(MODEL)[4]})


@pytest.mark.parametrize(
    ("call", "dies_at", "beginning"),
    [
        pytest.param(train(1, (EXITS, 1)), None, "forward_backward 1", id="left-by-exit"),
        pytest.param(step(1, learning_rate=DEADLY_RATE), None, "optim_step 1", id="step"),
        pytest.param(save(1, "deadly"), "state", "save_weights 1", id="save"),
    ],
)
async def test_each_kind_of_operation_is_given_up_and_its_model_continues(
    call: Call, dies_at: str | None, beginning: str, deadly: Path, tmp_path: Path
) -> None:
    async with worker(tmp_path, ONE_ATTEMPT, **{FOLDER_VARIABLE: str(deadly)}) as lives:
        await lives.run([create()])
        if dies_at:
            (deadly / dies_at).touch()
        await lives.run([call])
        assert lives.failure(1, MODEL).startswith(f"{beginning} was given up: the worker's process ended once")
        for file in deadly.iterdir():
            file.unlink()
        await lives.run([train(2), step(3), train(4), step(5), save(6, "sound")])
        assert lives.failure(5, MODEL) == lives.failure(6, MODEL) == ""
        assert lives.ended == 1


async def test_the_body_of_a_failed_call_is_not_read_again(tmp_path: Path) -> None:
    """A check of the old body must not take more than the call itself, which fitted."""
    async with worker(tmp_path) as lives:
        forward = train(2, (REFUSED, 2), forward_only=True)
        await lives.run([create(), train(1), forward, step(3), train(4, (REFUSED, 1)), step(5)])
        assert lives.ended == 0
        assert [lives.failure(seq_id, MODEL) for seq_id in (2, 4)] == ["the engine refuses the call"] * 2
        assert lives.failure(3, MODEL) == "", "a forward alone leaves no gradient that could be lost"
        assert "forward_backward 4 failed" in lives.failure(5, MODEL)


async def test_a_failed_create_leaves_its_place_to_the_next_model(tmp_path: Path) -> None:
    async with worker(tmp_path, ONE_ATTEMPT, "--adapter-slots=1", "--model-places=1") as lives:
        await lives.run([create(seed=DEADLY_SEED), create(model_id=OTHER)])
        assert lives.failure(0, MODEL).startswith("create_model 0 was given up")
        assert lives.failure(0, OTHER) == ""


async def test_the_error_has_the_last_sign_of_the_process(tmp_path: Path) -> None:
    async with worker(tmp_path, "--attempts-per-operation=2") as lives:
        await lives.run([create(), train(1, (ENDS, 1))])
        sign = "(the last sign: the ranks of the model are lost: rank 1 of 2 has no memory left)"
        assert f"the worker's process ended 2 times {sign} while it ran" in lives.failure(1, MODEL)


# ---- what was acknowledged, and kills when it is run again


async def waiting_reason(lives: Lives, seq_id: int) -> str:
    """Return why this operation of the first model does not run, once its worker reports it."""
    while True:
        reply = await lives.worker.result(seq_id, timeout=0.05)
        assert reply.WhichOneof("state") == "pending"
        if reply.pending.paused_capacity:
            return reply.pending.reason


async def test_an_answered_operation_is_never_revoked_and_its_model_waits_while_others_continue(
    deadly: Path, tmp_path: Path
) -> None:
    environment = {FOLDER_VARIABLE: str(deadly)}
    later = [train(3), step(4), save(5, "final")]
    async with worker(tmp_path / "undisturbed") as lives:
        await lives.run([create(), train(1, (9, 2)), step(2), *later])
        expected, expected_files = lives.results(MODEL), await lives.saved_files(MODEL)
    async with worker(tmp_path / "disturbed", "--attempts-per-operation=2", NO_SNAPSHOTS, **environment) as lives:
        await lives.run([create(), create(model_id=OTHER), train(1, (9, 2)), step(2)])
        (deadly / "forward_backward-9").touch()
        await lives.worker.kill()
        await lives.run([replace(call, model_id=OTHER) for call in (train(1), step(2))])
        assert lives.ended == 2
        assert lives.failure(2, OTHER) == ""
        for call in later:
            await lives.worker.submit(call)
        reason = await waiting_reason(lives, 3)
        assert reason.startswith(f"{MODEL} waits: the worker's process ended 2 times")
        assert "while forward_backward 1 ran again after a restart. Nothing is lost" in reason
        quarantined = {model.model_id: model.quarantined for model in (await lives.worker.describe()).models}
        assert quarantined == {MODEL: reason, OTHER: ""}

        (deadly / "forward_backward-9").unlink()
        assert await lives.worker.terminate() == 0
        await lives.run(later)
        assert (lives.ended, lives.results(MODEL)) == (2, expected)
        assert await lives.saved_files(MODEL) == expected_files


async def test_a_snapshot_that_kills_when_it_is_loaded_holds_up_its_own_model_alone(
    deadly: Path, tmp_path: Path
) -> None:
    async with worker(tmp_path, ONE_ATTEMPT, **{FOLDER_VARIABLE: str(deadly)}) as lives:
        await lives.run([create(), train(1), step(2), create(model_id=OTHER)])
        assert await lives.worker.terminate() == 0
        (deadly / f"load_state-{MODEL}").touch()
        await lives.run([replace(train(1), model_id=OTHER)])
        assert lives.ended == 1
        await lives.worker.submit(train(3))
        assert "while its snapshot of operation 2 was loaded" in await waiting_reason(lives, 3)


async def test_a_snapshot_that_kills_when_it_is_taken_is_not_taken(deadly: Path, tmp_path: Path) -> None:
    flags = (ONE_ATTEMPT, "--snapshot-replay-seconds=0", "--snapshot-cost-factor=0")
    async with worker(tmp_path, *flags, **{FOLDER_VARIABLE: str(deadly)}) as lives:
        await lives.run([create()])
        (deadly / "state").touch()
        await lives.run([train(1), step(2), train(3), step(4)])
        assert lives.ended == 1
        assert [lives.failure(seq_id, MODEL) for seq_id in range(5)] == [""] * 5


# ---- a disk that fails


SNAPSHOTS_OF_MINE = "/snapshots/.sess.train.0."


async def load_what_was_saved(lives: Lives, seq_id: int) -> Call:
    """Load a checkpoint. A load leaves a snapshot before its result is visible."""
    [saved] = [event.checkpoint_saved for event in await lives.worker.events() if event.HasField("checkpoint_saved")]
    request = worker_pb2.LoadWeights(
        directory=saved.directory,
        manifest_digest=saved.manifest_digest,
        tinker_path=f"tinker://{MODEL}/weights/{saved.name}",
        with_optimizer=True,
    )
    return Call(seq_id, worker_pb2.LOAD_WEIGHTS, request.SerializeToString())


async def test_a_snapshot_that_the_disk_does_not_keep_loses_nothing_and_leaves_nothing_half_done(
    deadly: Path, tmp_path: Path
) -> None:
    before, after = [create(), train(1), step(2), save(3, "a")], [train(5), step(6), save(7, "final")]
    async with worker(tmp_path / "undisturbed") as lives:
        await lives.run(before)
        await lives.run([await load_what_was_saved(lives, 4), *after])
        expected, expected_files = lives.results(MODEL), await lives.saved_files(MODEL)
    async with worker(tmp_path / "disturbed", **{FOLDER_VARIABLE: str(deadly)}) as lives:
        await lives.run(before)
        load = await load_what_was_saved(lives, 4)
        (deadly / BAD_DISK).write_text(SNAPSHOTS_OF_MINE)
        with suppress(grpc.aio.AioRpcError):  # it may end before it has acknowledged
            await lives.worker.submit(load)
        await lives.worker.wait_dead()
        (deadly / BAD_DISK).unlink()
        await lives.run([load, *after])
        assert (lives.ended, lives.results(MODEL)) == (1, expected)
        assert await lives.saved_files(MODEL) == expected_files


async def test_an_operation_fails_with_the_reason_when_no_process_can_keep_its_snapshot_and_its_model_continues(
    deadly: Path, tmp_path: Path
) -> None:
    async with worker(tmp_path, **{FOLDER_VARIABLE: str(deadly)}) as lives:
        await lives.run([create(), create(model_id=OTHER), train(1), step(2), save(3, "a")])
        load = await load_what_was_saved(lives, 4)
        (deadly / BAD_DISK).write_text(SNAPSHOTS_OF_MINE)
        await lives.run([load])
        await lives.run([replace(save(1, "b"), model_id=OTHER)])
        assert lives.ended == 3
        sign = r"\(the last sign: the operation could not be finished: .*Input/output error.*\)"
        given_up = rf"load_weights 4 was given up: the worker's process ended 3 times {sign} while it ran"
        assert re.match(given_up, lives.failure(4, MODEL))
        assert lives.failure(1, OTHER) == ""
        (deadly / BAD_DISK).unlink()
        await lives.run([train(5), step(6), save(7, "final")])
        assert (lives.ended, lives.failure(7, MODEL)) == (3, "")


# ---- ends that say nothing of the operation


async def in_the_middle(deadly: Path) -> None:
    """Wait for the middle of the call, after the restore before it."""
    while not (deadly / HUNG).exists():
        await asyncio.sleep(0.01)


async def test_a_stop_that_finds_no_end_of_the_operation_is_not_counted_against_it(
    deadly: Path, tmp_path: Path
) -> None:
    async with worker(tmp_path, ONE_ATTEMPT, **{FOLDER_VARIABLE: str(deadly)}) as lives:
        (deadly / HANGS).touch()
        await lives.run([create()])
        await lives.worker.submit(train(1))
        for _ in range(2):
            await in_the_middle(deadly)
            await stopped_and_killed(lives)
            (deadly / HUNG).unlink()
            await lives.worker.start()
        (deadly / HANGS).unlink()
        await lives.run([train(1), step(2)])
        assert (lives.failure(1, MODEL), lives.failure(2, MODEL)) == ("", "")


async def stopped_and_killed(lives: Lives) -> None:
    """Stop and kill the worker, as a pod whose grace period ends before its operation does."""
    process = lives.worker.process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    while not (await lives.worker.describe()).draining:
        await asyncio.sleep(0.01)
    await lives.worker.kill()


async def test_an_operation_that_hung_when_the_stop_came_is_given_up(deadly: Path, tmp_path: Path) -> None:
    flags = (ONE_ATTEMPT, "--hang-timeout-seconds=0.01")
    async with worker(tmp_path, *flags, **{FOLDER_VARIABLE: str(deadly)}) as lives:
        (deadly / HANGS).touch()
        await lives.run([create()])
        await lives.worker.submit(train(1))
        await in_the_middle(deadly)
        await asyncio.sleep(0.02)
        await stopped_and_killed(lives)
        await lives.run([train(1)])
        sign = r"\(the last sign: it was still running after \d+ s, when the worker was asked to stop\)"
        assert re.search(sign, lives.failure(1, MODEL))


@pytest.mark.parametrize("place", ["executed-before-result", "result-before-sync"])
async def test_a_death_outside_of_the_call_is_not_counted(place: str, tmp_path: Path) -> None:
    lives = Lives(WorkerProcess(tmp_path, (ENGINE, ONE_ATTEMPT)))
    try:
        await lives.worker.start(TINSMITH_FAILPOINT=f"{place}:2")
        # A step that was submitted with them might run while the result of its training call is written.
        await lives.run([create(), train(1)])
        assert lives.ended == 1
        await lives.run([step(2)])
        assert (lives.ended, [lives.failure(seq_id, MODEL) for seq_id in range(3)]) == (1, [""] * 3)
    finally:
        await lives.worker.kill()


def test_an_sdk_user_gets_a_deadly_operation_as_the_error_of_its_future_and_continues(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    settings = {"engine": "support.engine.deadly:build_deadly", "engine_flags": "--attempts-per-operation=2"}
    server = ServedInstallation(tmp_path / "data", {REFERENCE_MODEL: model}, settings).start()
    try:
        with service_client(server) as client:
            mine, other = (client.create_lora_training_client(REFERENCE_MODEL, rank=4).result() for _ in range(2))
            deadly = mine.forward_backward([next_token_datum((KILLS, 2, 6))], "cross_entropy")
            others = other.forward_backward([next_token_datum((5, 2, 6))], "cross_entropy")
            stepped = other.optim_step(adam())
            with pytest.raises(RequestFailedError, match="forward_backward 1 was given up") as failure:
                deadly.result()
            assert "the worker's process ended 2 times" in str(failure.value)
            assert len(others.result().loss_fn_outputs) == 1
            assert (stepped.result().metrics or {})["grad_norm"] > 0
            with pytest.raises(RequestFailedError, match="optim_step was not applied"):
                mine.optim_step(adam()).result()
            mine.forward_backward([next_token_datum((5, 2, 6))], "cross_entropy").result()
            assert (mine.optim_step(adam()).result().metrics or {})["grad_norm"] > 0
    finally:
        server.stop()
