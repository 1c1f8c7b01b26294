"""What a worker offers to samplers elsewhere: byte for byte what is on the root, and no more than was allowed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.engine.reference import ReferenceEngine
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot, SavedWeights
from tinsmith_trainer.checkpoints.offered_saves import (
    MOST_AT_ONCE,
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
        with saves.given(save.written.manifest_digest):
            return True
    except SaveNotOffered:
        return False


@pytest.mark.parametrize("sizes", [(1, 2, 3), (PART_BYTES, 5, PART_BYTES // 3), (PART_BYTES // 8,) * 5])
def test_what_is_given_is_byte_for_byte_what_is_on_the_root_in_parts(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    save, saves = saved(tmp_path, 1, *sizes), OfferedSaves(size_bytes=1024**3)
    saves.add(save)
    with saves.given(save.written.manifest_digest) as offer:
        parts = list(offer.parts())
    folder = tmp_path / save.written.directory
    assert b"".join(parts) == (folder / WEIGHTS_FILE).read_bytes()
    assert offer.manifest == (folder / "manifest.json").read_bytes()
    assert max(map(len, parts)) <= PART_BYTES
    assert min(map(len, parts)) > 0


def test_the_newest_are_kept(tmp_path: Path) -> None:
    saves = OfferedSaves(size_bytes=1024**3, most=2)
    made = [saved(tmp_path, seq_id) for seq_id in (1, 2, 3)]
    for save in made:
        saves.add(save)
    assert [offers(saves, save) for save in made] == [False, True, True]


def test_no_more_bytes_are_kept_than_were_allowed_and_what_is_larger_drives_out_none(tmp_path: Path) -> None:
    small, other, large = saved(tmp_path, 1, 1000), saved(tmp_path, 2, 1000), saved(tmp_path, 3, 9000)
    saves = OfferedSaves(size_bytes=small.written.size_bytes + other.written.size_bytes - 1)
    saves.add(small)
    saves.add(large)
    assert [offers(saves, save) for save in (small, large)] == [True, False]
    saves.add(other)
    assert [offers(saves, save) for save in (small, other)] == [False, True]


def test_without_room_for_any_nothing_is_kept(tmp_path: Path) -> None:
    saves = OfferedSaves(size_bytes=0)
    save = saved(tmp_path, 1)
    saves.add(save)
    assert not offers(saves, save)
    assert not saves.keeps_any


def test_only_some_are_given_at_once_and_whoever_is_done_lets_the_next_one_in(tmp_path: Path) -> None:
    saves, save = OfferedSaves(size_bytes=1024**3), saved(tmp_path, 1)
    saves.add(save)
    digest = save.written.manifest_digest
    under_way = [saves.given(digest) for _ in range(MOST_AT_ONCE)]
    for one in under_way:
        one.__enter__()
    with pytest.raises(TooManyStreams), saves.given(digest):
        pass
    under_way[0].__exit__(None, None, None)
    assert offers(saves, save)
