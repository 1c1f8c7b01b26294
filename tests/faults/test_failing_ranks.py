"""An error of one rank costs a life of the worker; an error of all ranks costs its own future."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.nemo_rl.failing_rank import SWITCH
from support.worker.messages import forward_backward, next_token_datum
from support.worker.process import Call, WorkerProcess, create, save, step, train
from tinsmith_rpc import worker_pb2

pytestmark = pytest.mark.timeout(1200)

FLAGS = ("--engine=support.nemo_rl.failing_rank:build", "--no-sampling", "--max-rank=8", "--snapshot-replay-seconds=0")
START_SECONDS, ANSWER_SECONDS = 400.0, 240.0
UNDISTURBED, DISTURBED = "sess:train:0", "sess:train:1"
TWO_DATUMS = [next_token_datum(tokens) for tokens in ((3, 1, 4, 1, 5), (9, 2, 6))]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """Copy the model: a test leaves a file in it."""
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture
async def worker(model: Path, tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    worker = WorkerProcess(tmp_path, (*FLAGS, f"--model={model}"), start_seconds=START_SECONDS)
    try:
        await worker.start()
        yield worker
    finally:
        await worker.kill()


def train_both(seq_id: int) -> Call:
    """Train both models with a datum for each rank."""
    body = forward_backward(TWO_DATUMS, model_id=UNDISTURBED, seq_id=seq_id)
    return Call(seq_id, worker_pb2.FORWARD_BACKWARD, body)


def train_without_bounds(seq_id: int) -> Call:
    """Train so that every number of the gradient is finite, and its norm is not."""
    datum = next_token_datum((3, 1, 4, 1, 5), weight=1e30)
    return Call(seq_id, worker_pb2.FORWARD_BACKWARD, forward_backward([datum], model_id=UNDISTURBED, seq_id=seq_id))


def forward_of_unknown_token(seq_id: int) -> Call:
    return train(seq_id, (3, 1, 2**30), forward_only=True)


async def run(worker: WorkerProcess, model_id: str, calls: list[Call]) -> list[worker_pb2.AwaitReply]:
    await submit(worker, model_id, calls)
    return await answers(worker, model_id, calls)


async def submit(worker: WorkerProcess, model_id: str, calls: list[Call]) -> None:
    for call in calls:
        await worker.submit(replace(call, model_id=model_id))


async def answers(worker: WorkerProcess, model_id: str, calls: list[Call]) -> list[worker_pb2.AwaitReply]:
    return [await worker.result(call.seq_id, model_id, ANSWER_SECONDS) for call in calls]


async def saved_tensors(worker: WorkerProcess) -> dict[str, dict[str, bytes]]:
    """Return the files of each model's checkpoint."""
    saved = [event.checkpoint_saved for event in await worker.events() if event.HasField("checkpoint_saved")]
    folders = {event.model_id: worker.folder / "checkpoints" / event.directory for event in saved}
    return {
        model: {file.name: file.read_bytes() for file in path.glob("*.safetensors")} for model, path in folders.items()
    }


async def test_a_rank_that_fails_alone_ends_the_worker_and_the_next_one_computes_the_same_bits(
    worker: WorkerProcess, model: Path
) -> None:
    before = [create(), train_both(1), step(2), train_both(3)]
    after = [train_both(4), step(5), train_both(6), step(7), save(8, "final")]
    undisturbed = await run(worker, UNDISTURBED, [*before, *after])
    instance = (await worker.describe()).instance_id

    disturbed = await run(worker, DISTURBED, before)
    (model / SWITCH).touch()
    await submit(worker, DISTURBED, after)
    assert await worker.wait_dead() != 0
    assert not (model / SWITCH).exists(), "the rank did not fail"
    await worker.kill()
    await worker.start()
    disturbed += await answers(worker, DISTURBED, after)

    assert (await worker.describe()).instance_id != instance
    # The first and the last, create and save, name their model.
    assert disturbed[1:-1] == undisturbed[1:-1]
    tensors = await saved_tensors(worker)
    assert len(tensors[DISTURBED]) == 2
    assert tensors[DISTURBED] == tensors[UNDISTURBED]


async def test_an_operation_that_all_ranks_refuse_fails_only_its_own_future(worker: WorkerProcess) -> None:
    first, second = [create(), train_both(1), step(2)], [train_both(6), step(7), save(8, "final")]
    refused = [forward_of_unknown_token(3), train_without_bounds(4), step(5)]
    undisturbed = await run(worker, UNDISTURBED, first)
    undisturbed += await run(worker, UNDISTURBED, [replace(call, seq_id=call.seq_id - 3) for call in second])
    instance = (await worker.describe()).instance_id

    disturbed = await run(worker, DISTURBED, first)
    unknown, unbounded, norm = await run(worker, DISTURBED, refused)
    disturbed += await run(worker, DISTURBED, second)

    assert unknown.failure.category == norm.failure.category == worker_pb2.USER
    assert "1073741824" in unknown.failure.message
    assert "the gradient's norm is inf" in norm.failure.message
    assert not unbounded.HasField("failure")
    assert (await worker.describe()).instance_id == instance
    assert disturbed[1:-1] == undisturbed[1:-1]
    tensors = await saved_tensors(worker)
    assert tensors[DISTURBED] == tensors[UNDISTURBED]
