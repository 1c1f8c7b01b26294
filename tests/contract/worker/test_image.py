"""The image of a journal: its operations are replayed on the same one, or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.worker.in_process import Worker
from support.worker.process import create, save, train
from tinsmith_trainer.errors import ImageChanged
from tinsmith_trainer.worker.numerics import FAST, MODE, check_numerics
from tinsmith_trainer.worker.startup import pin_image, with_journal
from tinsmith_trainer.worker.volume import Volume

OLD, NEW = "tinsmith/trainer@sha256:old", "tinsmith/trainer@sha256:new"


async def started(folder: Path, image: str) -> Worker:
    pin_image(Volume(folder / "volume"), image)
    worker = Worker(folder)
    await worker.service.activate(1)
    return worker


def disk_of_a_crash(folder: Path, target: Path) -> Volume:
    """Copy the volume as a process leaves it that dies now, without a last snapshot."""
    return Volume(Path(shutil.copytree(folder / "volume", target)))


async def test_results_that_were_given_out_bind_the_journal_to_their_image(tmp_path: Path) -> None:
    worker = await started(tmp_path, OLD)
    await worker.submit(create(), train(1))
    await worker.finished(1)
    volume = disk_of_a_crash(tmp_path, tmp_path / "crashed")
    await worker.service.drain()

    with pytest.raises(ImageChanged, match=rf"1 operation.*ran on the image {OLD}.*{NEW}.*stop cleanly") as refusal:
        pin_image(volume, NEW)
    assert refusal.value.image == OLD

    pin_image(volume, OLD)


@pytest.mark.parametrize("mode_of", ["the crashed process", "this process"])
async def test_fast_numerics_replay_on_any_image(tmp_path: Path, mode_of: str) -> None:
    worker = await started(tmp_path, OLD)
    await worker.submit(create(), train(1))
    await worker.finished(1)
    volume = disk_of_a_crash(tmp_path, tmp_path / "crashed")
    await worker.service.drain()
    if mode_of == "the crashed process":
        with_journal(volume, lambda journal: check_numerics(journal, {MODE: FAST}, volume))
    pin_image(volume, NEW, is_fast=mode_of == "this process")
    with_journal(volume, lambda journal: check_numerics(journal, {MODE: "fast"}, volume))
    pin_image(volume, OLD)


async def test_after_a_clean_stop_another_image_is_welcome_and_remembered(tmp_path: Path) -> None:
    worker = await started(tmp_path, OLD)
    await worker.submit(create(), train(1))
    await worker.finished(1)
    await worker.service.drain()

    successor = await started(tmp_path, NEW)
    await successor.service.activate(2)
    await successor.submit(train(2))
    await successor.finished(2)
    volume = disk_of_a_crash(tmp_path, tmp_path / "crashed")
    await successor.service.drain()
    with pytest.raises(ImageChanged, match=NEW):
        pin_image(volume, OLD)


async def test_operations_in_a_snapshot_and_pending_operations_accept_any_image(tmp_path: Path) -> None:
    worker = await started(tmp_path, OLD)
    await worker.submit(create(), train(1))
    await worker.finished(1)
    await worker.service.snapshot()
    await worker.submit(save(2, "a"), train(4))  # an operation that a replay skips binds no image, either
    await worker.finished(2)
    assert await worker.is_pending(4)
    volume = disk_of_a_crash(tmp_path, tmp_path / "crashed")
    await worker.service.drain()
    pin_image(volume, NEW)
