"""One line at one replica: what a round costs, and whom it wakes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from support.server.fake_fleet import BASE_MODEL, FakeFleet, FakeHandle
from support.server.store_records import NOW, a_model
from tinsmith_server.fleet.base import Changes, ServedModel
from tinsmith_server.services.training.placement import PlacementRounds
from tinsmith_server.store.connection import StoreUnavailable
from tinsmith_server.store.queries.placements import ChooseSlots
from tinsmith_server.store.records import Model, PlacementQueue, QueuedModel, SlotHolder
from tinsmith_server.store.store import Store


class StoreInMemory:
    """A store of models that counts its queries; `broken` is its answer when set."""

    def __init__(self, waiting: int) -> None:
        self.models: dict[str, Model] = {}
        for _ in range(waiting):
            self.add()
        self.reads = 0
        self.writes = 0
        self.broken: Exception | None = None

    def add(self) -> Model:
        model = a_model(model_seq_id=len(self.models), base_model=BASE_MODEL, worker_id="")
        self.models[model.model_id] = model
        return model

    def put(self, model_id: str, **fields: Any) -> None:
        self.models[model_id] = replace(self.models[model_id], **fields)

    async def placement_queue(self, _base_models: Collection[str], _worker_ids: Collection[str]) -> PlacementQueue:
        self.reads += 1
        if self.broken is not None:
            raise self.broken
        return self._queue()

    async def place_models(
        self, _names: Collection[str], _slots: Mapping[str, int], choose: ChooseSlots
    ) -> Mapping[str, str]:
        self.writes += 1
        assignments = choose(self._queue())
        for model_id, worker_id in assignments.items():
            self.put(model_id, worker_id=worker_id)
        return assignments

    async def get_model(self, model_id: str) -> Model | None:
        self.reads += 1
        return self.models.get(model_id)

    def _queue(self) -> PlacementQueue:
        live = [model for model in self.models.values() if model.state == "accepted"]
        return PlacementQueue(
            tuple(QueuedModel(m.model_id, m.tenant, m.base_model, m.lora_rank) for m in live if not m.worker_id),
            tuple(SlotHolder(m.model_id, m.session_id, m.tenant, m.worker_id, NOW) for m in live if m.worker_id),
        )


class Kept:
    """A line over a worker with `slots`, and those who wait in it."""

    def __init__(self, slots: int, waiting: int) -> None:
        self.store = StoreInMemory(waiting)
        self.fleet = FakeFleet([ServedModel(BASE_MODEL, "tiny-1")], [FakeHandle("w1", "tiny-1", slots)])
        self.freed = Changes()
        store = cast("Store", self.store)
        self.keeper = PlacementRounds(store, self.fleet, "tiny-1", self.freed, 1, clock=lambda: NOW)
        self.tasks: dict[str, asyncio.Task[Model]] = {}
        for model in self.store.models.values():
            self._wait_for(model)

    def come(self) -> str:
        """One more; its id."""
        model = self.store.add()
        self._wait_for(model)
        return model.model_id

    def _wait_for(self, model: Model) -> None:
        self.tasks[model.model_id] = asyncio.create_task(self.keeper.wait_until_placed(model, ()))

    @property
    def placed(self) -> list[str]:
        return [model_id for model_id, task in self.tasks.items() if task.done()]

    async def rounds(self, count: int) -> None:
        """Wait for this many more placement rounds."""
        until = self.store.reads + count
        while self.store.reads < until:
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        await self.keeper.close()
        self.fleet.cleanup()


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RECHECK_SECONDS", "BATCH_DELAY_SECONDS", "CONFLICT_WAIT_SECONDS"):
        monkeypatch.setattr(f"tinsmith_server.services.training.placement.{name}", 0.001)


async def test_a_thousand_waiters_cause_one_store_query_a_round_and_no_write() -> None:
    kept = Kept(slots=0, waiting=1000)
    await kept.rounds(20)
    looked = kept.store.reads
    assert kept.keeper.reason(kept.store.models["session-1:train:999"])
    assert kept.store.reads == looked, "a reason costs no look of its own"
    assert kept.store.writes == 0
    assert kept.placed == []
    await kept.close()


async def test_models_that_arrive_at_once_are_placed_by_one_write() -> None:
    kept = Kept(slots=50, waiting=50)
    await asyncio.gather(*kept.tasks.values())
    assert {task.result().worker_id for task in kept.tasks.values()} == {"w1"}
    assert kept.store.writes == 1
    assert kept.store.reads == 1, "a second look, for those who were just given a place, would be for nothing"
    await kept.close()


async def test_models_are_placed_without_a_query_until_the_first_finds_no_place() -> None:
    kept = Kept(slots=2, waiting=1)
    await kept.tasks["session-1:train:0"]
    assert (await kept.tasks[kept.come()]).worker_id == "w1"
    assert (kept.store.reads, kept.store.writes) == (1, 2)
    third = kept.come()
    await kept.rounds(20)
    assert kept.store.writes == 3, "one that has found no room has all later rounds look first"
    assert str(kept.keeper.reason(kept.store.models[third])).startswith("waiting for one of 2 places of org/tiny")
    await kept.close()


async def test_a_free_slot_wakes_only_the_model_that_gets_it() -> None:
    kept = Kept(slots=2, waiting=1000)
    await kept.rounds(3)
    first = [f"session-1:train:{number}" for number in range(3)]
    assert kept.placed == first[:2]
    kept.store.put(first[0], state="released")
    kept.freed.note()
    assert (await kept.tasks[first[2]]).worker_id == "w1"
    assert kept.placed == first
    await kept.close()


async def test_the_turn_moves_while_one_waits() -> None:
    kept = Kept(slots=1, waiting=4)
    last = kept.store.models["session-1:train:3"]
    await kept.rounds(3)
    assert str(kept.keeper.reason(last)).startswith("3rd of 3 waiting for one of 1 places of org/tiny; 1 held by")
    kept.store.put("session-1:train:0", state="released")
    await kept.tasks["session-1:train:1"]
    await kept.rounds(2)
    assert str(kept.keeper.reason(last)).startswith("2nd of 2 waiting")
    await kept.close()


async def test_a_model_that_just_got_a_place_has_no_reason_to_wait() -> None:
    kept = Kept(slots=1, waiting=2)
    first, second = kept.store.models.values()
    await kept.keeper.look()
    assert kept.keeper.reason(first) is None
    assert str(kept.keeper.reason(second)).startswith("waiting for one of 1 places of org/tiny")
    await kept.close()


async def test_models_that_another_replica_placed_or_that_ended_are_woken() -> None:
    kept = Kept(slots=0, waiting=3)
    await kept.rounds(1)
    kept.store.put("session-1:train:0", worker_id="w9")
    kept.store.put("session-1:train:1", state="released")
    assert (await kept.tasks["session-1:train:0"]).worker_id == "w9"
    assert (await kept.tasks["session-1:train:1"]).state == "released"
    assert kept.placed == ["session-1:train:0", "session-1:train:1"]
    await kept.close()


@pytest.mark.parametrize("error", [StoreUnavailable("the store is away"), RuntimeError("a mistake of ours")])
async def test_the_error_of_a_failed_round_is_the_reason_to_wait_and_the_next_round_runs(error: Exception) -> None:
    kept = Kept(slots=1, waiting=1)
    kept.store.broken = error
    await kept.rounds(2)
    assert str(error) in str(kept.keeper.reason(kept.store.models["session-1:train:0"]))
    kept.store.broken = None
    assert (await kept.tasks["session-1:train:0"]).worker_id == "w1"
    await kept.close()


async def test_no_round_runs_when_no_model_waits() -> None:
    kept = Kept(slots=1, waiting=1)
    await kept.tasks["session-1:train:0"]
    rounds = kept.keeper._rounds
    assert rounds is not None
    await rounds
    looked = kept.store.reads
    kept.freed.note()
    await asyncio.sleep(0)
    assert kept.store.reads == looked
    await kept.close()


async def test_cancelled_waiters_leave_the_queue() -> None:
    kept = Kept(slots=0, waiting=1)
    await kept.rounds(1)
    kept.tasks["session-1:train:0"].cancel()
    rounds = kept.keeper._rounds
    assert rounds is not None
    await rounds
    await kept.close()
