"""Adapters in a sampler's memory: never more than were allowed, never dropped under a sample, never starved."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.reference import ReferenceEngine
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.checkpoints.checkpoint_root import (
    CheckpointRoot,
    LoadedCheckpoint,
    SavedWeights,
    WrittenCheckpoint,
)
from tinsmith_trainer.checkpoints.shared_saves import SaveSocket
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.errors import CheckpointInvalid, OutOfMemory
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.sampling.sampler_adapters import MOST_PREPARING, AdapterInUse, AdapterLimits, SamplerAdapters
from tinsmith_trainer.sampling.weight_sources import WeightSources
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

BASE = ReferenceEngine().base_model()
WAIT_SECONDS = 20.0
STATE_BYTES = 100
TENANT = "tenant"


@dataclass
class Memory:
    """A sampler's memory and a checkpoint root in one. Reading stands at the gate while it is shut."""

    limit: int = 2
    max_rank: int = 8
    max_idle_bytes: int | None = None
    room: int = 100
    held: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    most_held: int = 0
    broken: set[str] = field(default_factory=set)
    ranks: dict[str, int] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def adapters(self, saves_socket: Path | None = None) -> SamplerAdapters:
        limits = AdapterLimits(self.limit, self.max_rank, self.max_idle_bytes)
        sources = WeightSources(cast(CheckpointRoot, self), BASE, saves_socket=saves_socket)
        return SamplerAdapters(cast(Sampler, self), sources, limits)

    def read(self, directory: str, manifest_digest: str, base: BaseModelInfo) -> LoadedCheckpoint:
        assert self.gate.wait(WAIT_SECONDS)
        self.reads.append(directory)
        if directory in self.broken:
            raise CheckpointInvalid(f"The checkpoint {directory} is damaged.")
        return LoadedCheckpoint(state(self.ranks.get(directory, 1)), has_optimizer=False)

    def load_adapter(self, adapter_key: str, state: AdapterState) -> None:
        assert adapter_key not in self.held
        if len(self.held) == self.room:
            raise OutOfMemory("There is no memory for another adapter.")
        self.held.append(adapter_key)
        self.most_held = max(self.most_held, len(self.held))

    def drop_adapter(self, adapter_key: str) -> None:
        self.held.remove(adapter_key)


def state(rank: int) -> AdapterState:
    return AdapterState(LoraSpec(rank=rank, alpha=32.0, seed=0), 0, {"weights": np.zeros(STATE_BYTES, np.uint8)})


def reference(name: str) -> worker_pb2.AdapterRef:
    return worker_pb2.AdapterRef(directory=name, manifest_digest=name)


async def taken(adapters: SamplerAdapters, name: str, tenant: str = TENANT) -> AdapterInUse:
    return await asyncio.wait_for(adapters.take(reference(name), tenant), WAIT_SECONDS)


async def used(adapters: SamplerAdapters, name: str) -> None:
    adapters.give_back(await taken(adapters, name), TENANT)


async def settle() -> None:
    """Run the loop until only external events are left."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_adapter_is_read_once_for_concurrent_samples() -> None:
    memory = Memory()
    adapters = memory.adapters()
    await asyncio.gather(*(used(adapters, "a") for _ in range(10)))
    assert memory.reads == ["a"]


async def test_the_one_unused_for_longest_makes_room() -> None:
    memory = Memory(limit=2)
    adapters = memory.adapters()
    for name in ("a", "b", "a", "c"):
        await used(adapters, name)
    assert sorted(memory.held) == ["a", "c"]
    assert len(adapters) == 2


async def test_idle_adapters_are_evicted_when_they_take_too_much_memory() -> None:
    memory = Memory(limit=9, max_idle_bytes=2 * STATE_BYTES)
    adapters = memory.adapters()
    in_use = await taken(adapters, "in use")
    for name in ("b", "c", "d", "e"):
        await used(adapters, name)
    assert memory.held == ["in use", "d", "e"]
    adapters.give_back(in_use, TENANT)
    assert memory.held == ["d", "e"]


async def test_idle_adapters_make_room_when_memory_is_short() -> None:
    memory = Memory(limit=9, room=3)
    adapters = memory.adapters()
    in_use = await taken(adapters, "in use")
    for name in ("b", "c", "d", "e"):
        await used(adapters, name)
    assert memory.held == ["in use", "d", "e"]
    others = [await taken(adapters, name) for name in ("d", "e")]
    with pytest.raises(OutOfMemory):
        await taken(adapters, "f")
    for adapter in (in_use, *others):
        adapters.give_back(adapter, TENANT)
    await used(adapters, "f")


async def test_an_adapter_in_use_is_never_dropped_even_if_it_is_the_oldest() -> None:
    memory = Memory(limit=2)
    adapters = memory.adapters()
    await taken(adapters, "in use")
    for name in ("b", "c", "d"):
        await used(adapters, name)
    assert "in use" in memory.held
    assert memory.most_held == 2


async def test_a_new_adapter_waits_for_the_first_free_slot_if_all_are_in_use() -> None:
    memory = Memory(limit=1)
    adapters = memory.adapters()
    first = await taken(adapters, "a")
    newcomer = asyncio.create_task(taken(adapters, "b"))
    await settle()
    assert memory.held == ["a"]
    adapters.give_back(first, TENANT)
    assert (await newcomer).key == "b"
    assert memory.held == ["b"]


async def test_a_program_that_never_rests_does_not_keep_another_out() -> None:
    """Its next sample would always arrive before the last one ends."""
    memory = Memory(limit=1)
    adapters = memory.adapters()
    first = await taken(adapters, "busy")
    newcomer = asyncio.create_task(taken(adapters, "patient"))
    await settle()
    second = asyncio.create_task(taken(adapters, "busy"))
    await settle()
    assert not second.done()
    adapters.give_back(first, TENANT)
    adapters.give_back(await newcomer, TENANT)
    assert (await second).key == "busy"


async def test_adapters_in_memory_stay_usable_while_another_waits_for_room() -> None:
    memory = Memory(limit=2)
    adapters = memory.adapters()
    await taken(adapters, "to leave")
    await taken(adapters, "stays")
    newcomer = asyncio.create_task(taken(adapters, "new"))
    await settle()
    await used(adapters, "stays")
    assert not newcomer.done()
    newcomer.cancel()


async def test_an_adapter_is_not_dropped_while_it_is_read() -> None:
    memory = Memory(limit=1)
    memory.gate.clear()
    adapters = memory.adapters()
    first, second = (asyncio.create_task(used(adapters, name)) for name in ("a", "b"))
    await settle()
    memory.gate.set()
    await asyncio.gather(first, second)
    assert (memory.held, memory.most_held) == (["b"], 1)


async def test_a_damaged_checkpoint_fails_its_samples_and_frees_its_memory() -> None:
    memory = Memory(limit=1, broken={"bad"})
    adapters = memory.adapters()
    wanting = [asyncio.create_task(taken(adapters, name)) for name in ("bad", "bad", "good")]
    outcomes = await asyncio.gather(*wanting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [CheckpointInvalid, CheckpointInvalid, AdapterInUse]
    assert memory.held == ["good"]


async def test_an_adapter_that_could_not_be_read_is_read_again_for_the_next_sample() -> None:
    memory = Memory(broken={"a"})
    adapters = memory.adapters()
    with pytest.raises(CheckpointInvalid):
        await taken(adapters, "a")
    memory.broken.clear()
    await used(adapters, "a")
    assert memory.reads == ["a", "a"]


async def test_weights_that_were_just_saved_are_not_read_back() -> None:
    memory = Memory()
    adapters = memory.adapters()
    written = WrittenCheckpoint("a", b"its manifest", 1)
    adapters.remember_saved(SavedWeights(written, state(1)))
    await settle()
    await used(adapters, written.manifest_digest)
    assert (memory.reads, memory.held) == ([], [written.manifest_digest])
    assert adapters.sources.taken() == {"own": 1}


async def test_only_weights_that_the_local_worker_does_not_share_are_read(tmp_path: Path) -> None:
    memory = Memory()
    door = SaveSocket(tmp_path / "saves")
    weights = {"weights/a.lora_A": np.zeros((1, 4), np.float32)}
    shared = AdapterState(LoraSpec(rank=1, alpha=32.0, seed=0), 0, weights)
    with door.saves.copying(shared, BASE.revision) as written:
        written("a")
    adapters = memory.adapters(tmp_path / "saves")
    for name in ("a", "b"):
        await used(adapters, name)
    door.close()
    await used(adapters, "c")
    assert memory.reads == ["b", "c"]


# ---- adapters that are announced before a sample names them


async def test_an_announced_adapter_is_loaded_when_its_first_sample_arrives() -> None:
    memory = Memory()
    adapters = memory.adapters()
    adapters.prepare(reference("a"))
    adapters.prepare(reference("a"))
    await used(adapters, "a")
    assert (memory.reads, memory.held) == (["a"], ["a"])


async def test_a_sample_waits_for_the_announced_adapter_that_is_being_read() -> None:
    memory = Memory()
    memory.gate.clear()
    adapters = memory.adapters()
    adapters.prepare(reference("a"))
    sample = asyncio.create_task(used(adapters, "a"))
    await settle()
    assert not sample.done()
    memory.gate.set()
    await sample
    assert memory.reads == ["a"]


async def test_announced_adapters_are_read_two_at_a_time() -> None:
    memory = Memory(limit=9)
    memory.gate.clear()
    adapters = memory.adapters()
    for name in ("a", "b", "c"):
        adapters.prepare(reference(name))
    assert len(adapters) == MOST_PREPARING
    memory.gate.set()
    await used(adapters, "c")


async def test_an_announced_adapter_that_cannot_be_read_is_read_again_for_its_sample() -> None:
    memory = Memory(limit=1, broken={"a"})
    adapters = memory.adapters()
    await announced(adapters, "a")
    assert len(adapters) == 0
    memory.broken.clear()
    await used(adapters, "a")


async def announced(adapters: SamplerAdapters, name: str) -> None:
    """Wait until the announcement has been read and its consequences have happened."""
    adapters.prepare(reference(name))
    async with asyncio.timeout(WAIT_SECONDS):
        while adapters._preparing:
            await asyncio.sleep(0.001)
    await settle()


@given(
    limit=st.integers(1, 3),
    names=st.lists(st.sampled_from("abcde"), min_size=1, max_size=40),
    pauses=st.lists(st.integers(0, 3), min_size=1, max_size=5),
)
def test_every_caller_gets_its_adapter_within_the_limit(limit: int, names: list[str], pauses: list[int]) -> None:
    memory = Memory(limit=limit)

    async def use(adapters: SamplerAdapters, index: int, name: str) -> None:
        adapter = await taken(adapters, name)
        for _ in range(pauses[index % len(pauses)]):
            assert name in memory.held
            await asyncio.sleep(0)
        assert name in memory.held
        adapters.give_back(adapter, TENANT)

    async def use_all() -> int:
        adapters = memory.adapters()
        await asyncio.gather(*(use(adapters, index, name) for index, name in enumerate(names)))
        return len(adapters)

    assert asyncio.run(use_all()) == min(limit, len(set(names)))
    assert memory.most_held <= limit


async def test_a_tenant_with_many_versions_lets_in_another_with_the_next_that_is_free() -> None:
    memory = Memory(limit=2)
    adapters = memory.adapters()
    # One is read at a time: threads that read two could begin in any order.
    first = await taken(adapters, "many-0", "many")
    many = [asyncio.create_task(taken(adapters, f"many-{n}", "many")) for n in range(1, 8)]
    held = [await many[0]]
    one = asyncio.create_task(taken(adapters, "one", "one"))
    await settle()
    adapters.give_back(first, "many")
    adapters.give_back(await asyncio.wait_for(one, WAIT_SECONDS), "one")
    assert memory.reads == ["many-0", "many-1", "one"]
    for task in many[1:]:
        held.append(await asyncio.wait_for(task, WAIT_SECONDS))
        adapters.give_back(held.pop(0), "many")
    adapters.give_back(held.pop(), "many")
    assert memory.reads[3:] == [f"many-{n}" for n in range(2, 8)]
