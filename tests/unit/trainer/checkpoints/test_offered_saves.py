"""A worker's offers to remote samplers: byte for byte the root's files, and no more than the limit."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from support.engine.reference import ReferenceEngine
from tinsmith_trainer.checkpoints import offered_saves
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot, SavedWeights
from tinsmith_trainer.checkpoints.offered_saves import (
    MAX_STREAMS,
    PART_BYTES,
    OfferedSaves,
    SaveNotOffered,
    TooManyStreams,
)
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.engines.peft_layout import WEIGHTS_FILE

BASE = ReferenceEngine().base_model()


def state(*sizes: int) -> AdapterState:
    """Tensors of so many numbers."""
    draw = np.random.default_rng(1)
    tensors = {f"weights/{index}.lora_A": draw.random(size, np.float32) for index, size in enumerate(sizes)}
    return AdapterState(LoraSpec(4, 32.0, 7), 3, tensors)


def saved(folder: Path, seq_id: int, *sizes: int) -> SavedWeights:
    weights = state(*(sizes or (100,)))
    root = CheckpointRoot(f"file://{folder}")
    return SavedWeights(root.write("s:train:0", seq_id, 1, "sampler", weights, BASE, "ephemeral"), weights)


def offers(saves: OfferedSaves, save: SavedWeights) -> bool:
    try:
        saves.find(save.written.manifest_digest)
    except SaveNotOffered:
        return False
    return True


@pytest.mark.parametrize("sizes", [(1, 2, 3), (PART_BYTES, 5, PART_BYTES // 3), (PART_BYTES // 8,) * 5])
def test_a_streamed_save_has_the_bytes_of_the_root(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    save, saves = saved(tmp_path, 1, *sizes), OfferedSaves(size_bytes=1024**3)
    saves.add(save)
    offer = saves.find(save.written.manifest_digest)
    parts = list(offer.parts())
    folder = tmp_path / save.written.directory
    assert b"".join(parts) == (folder / WEIGHTS_FILE).read_bytes()
    assert offer.manifest == (folder / "manifest.json").read_bytes()
    assert max(map(len, parts)) <= PART_BYTES
    assert min(map(len, parts)) > 0


def test_kept_bytes_stay_within_the_limit_and_a_larger_item_evicts_none(tmp_path: Path) -> None:
    small, other, large = saved(tmp_path, 1, 1000), saved(tmp_path, 2, 1000), saved(tmp_path, 3, 9000)
    saves = OfferedSaves(size_bytes=small.written.size_bytes + other.written.size_bytes - 1)
    saves.add(small)
    saves.add(large)
    assert [offers(saves, save) for save in (small, large)] == [True, False]
    saves.add(other)
    assert [offers(saves, save) for save in (small, other)] == [False, True]


async def test_only_some_saves_are_streamed_at_once_and_each_end_starts_the_next(tmp_path: Path) -> None:
    saves, save = OfferedSaves(size_bytes=1024**3), saved(tmp_path, 1)
    saves.add(save)
    first, *others = (asyncio.Event() for _ in range(MAX_STREAMS))
    given: list[asyncio.Event] = []

    async def take(until: asyncio.Event) -> None:
        async with saves.streaming(save.written.manifest_digest):
            given.append(until)
            await until.wait()

    last = asyncio.Event()
    taking = [asyncio.create_task(take(until)) for until in (first, *others, last)]
    while len(given) < MAX_STREAMS:
        await asyncio.sleep(0)
    first.set()
    await taking[0]
    while len(given) <= MAX_STREAMS:
        await asyncio.sleep(0)
    assert given[-1] is last
    for until in (*others, last):
        until.set()
    await asyncio.gather(*taking)


async def test_no_stream_waits_long_for_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offered_saves, "STREAM_WAIT_SECONDS", 0.01)
    saves, save = OfferedSaves(size_bytes=1024**3), saved(tmp_path, 1)
    saves.add(save)
    async with AsyncExitStack() as under_way:
        for _ in range(MAX_STREAMS):
            await under_way.enter_async_context(saves.streaming(save.written.manifest_digest))
        with pytest.raises(TooManyStreams):
            await under_way.enter_async_context(saves.streaming(save.written.manifest_digest))
