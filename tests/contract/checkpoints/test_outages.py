"""A bucket that cannot be reached: only saved data is acknowledged, and all work continues when it is back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server.s3 import S3Server, used_here
from support.worker.in_process import Worker
from support.worker.process import MODEL, create, save, step, train
from tinsmith_server.errors import CheckpointRootUnavailable
from tinsmith_server.services.checkpoints.files import CheckpointFiles
from tinsmith_trainer.training import retries

ROOT = "s3://checkpoints/prefix"


@pytest.fixture
def s3_down() -> Iterator[S3Server]:
    """Return a server that has not started. A bucket `checkpoints` must be made."""
    server = S3Server()
    with used_here(server):
        yield server
    server.stop()


async def test_a_save_waits_while_the_bucket_is_away_and_is_there_when_it_is_back(
    s3_down: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "STORAGE_RETRY_SECONDS", 0.05)
    worker = Worker(tmp_path, checkpoints=ROOT)
    await worker.service.activate(1)
    await worker.submit(create(), train(1), step(2), save(3, "first"), train(4), step(5))
    await worker.finished(2)
    assert await worker.is_pending(3)
    s3_down.start()
    s3_down.make_bucket("checkpoints")
    assert (await worker.finished(3)).failure is None
    assert (await worker.finished(5)).failure is None
    [saved] = [event.checkpoint_saved for event in await worker.events() if event.HasField("checkpoint_saved")]
    loaded = worker.service.parts.checkpoints.read(saved.directory, saved.manifest_digest, worker.engine.base_model())
    assert loaded.state.optimizer_step == 1
    await worker.service.drain()


async def test_a_save_during_a_long_bucket_outage_fails_with_a_message_and_training_continues(
    s3_down: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "STORAGE_WAIT_SECONDS", 0.0)
    worker = Worker(tmp_path, checkpoints=ROOT)
    await worker.service.activate(1)
    await worker.submit(create(), train(1), step(2), save(3, "first"))
    failure = await worker.failure(3)
    assert failure.startswith("server: The checkpoint weights/sess.train.0/3 could not be saved to s3://checkpoints")
    assert "Could not connect to the endpoint" in failure
    assert not any(event.HasField("checkpoint_saved") for event in await worker.events())

    s3_down.start()
    s3_down.make_bucket("checkpoints")
    await worker.submit(train(4), step(5), save(6, "first"))
    assert (await worker.finished(6)).failure is None
    [saved] = [event.checkpoint_saved for event in await worker.events() if event.HasField("checkpoint_saved")]
    loaded = worker.service.parts.checkpoints.read(saved.directory, saved.manifest_digest, worker.engine.base_model())
    for name, value in worker.engine.state(MODEL).weights_only().tensors.items():
        assert loaded.state.tensors[name].tobytes() == value.tobytes(), name
    await worker.service.drain()


def test_a_server_says_which_root_it_cannot_use(s3_down: S3Server) -> None:
    files = CheckpointFiles(ROOT)
    for use in (files.list, files.remove, lambda directory: files.read(directory, "file")):
        with pytest.raises(CheckpointRootUnavailable, match=f"the checkpoint root {ROOT} cannot be used"):
            use("weights/run/1-1")
