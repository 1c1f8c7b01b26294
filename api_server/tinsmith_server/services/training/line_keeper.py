"""Keeps one line at this replica: looks for places in rounds, and wakes those of its own that have got one."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Collection
from dataclasses import dataclass, replace

from tinsmith_server.errors import TinsmithError
from tinsmith_server.fleet.base import Changes, Fleet
from tinsmith_server.logs import get_logger
from tinsmith_server.services.training.line import Places, Wait, fair_order, share_out
from tinsmith_server.store.records import Clock, Line, Model
from tinsmith_server.store.store import Store

log = get_logger(__name__)

# A slot that another replica frees is found by asking the store again.
RECHECK_SECONDS = 2.0
# So that a thousand creates that come at once are a few looks at the line and not a thousand.
BREATHER_SECONDS = 0.1
# What another replica gives at the same moment is in the store when its transaction ends.
CONTEST_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class _Waiter:
    model: Model
    refused_by: Collection[str]
    placed: asyncio.Future[Model]


class LineKeeper:
    """However many wait, a round reads the store once, and writes only where there is a place to give, or was one the
    last time: then it does not look first, since whoever comes next finds one, too.
    """

    def __init__(self, store: Store, fleet: Fleet, weights: str, freed: Changes, kept: int, clock: Clock) -> None:
        """`weights` names the line; `freed` is noted when a place may have come free."""
        self._store = store
        self._fleet = fleet
        self._weights = weights
        self._freed = freed
        self._kept = kept
        self._clock = clock
        self._waiters: dict[str, _Waiter] = {}
        self._rounds: asyncio.Task[None] | None = None
        self._line = Line()
        self._turns: dict[str, int] | None = None
        self._next_steps: dict[tuple[str, int], str] = {}
        self._trouble: str | None = None
        self._there_was_room = False

    async def until_placed(self, model: Model, refused_by: Collection[str]) -> Model:
        """The model once it has a worker, or has ended."""
        waiter = _Waiter(model, refused_by, asyncio.get_running_loop().create_future())
        self._waiters[model.model_id] = waiter
        self._freed.note()
        if self._rounds is None or self._rounds.done():
            name = f"line for {self._weights}"
            self._rounds = asyncio.create_task(self._run(), name=name, context=contextvars.Context())
        try:
            return await waiter.placed
        finally:
            if self._waiters.get(model.model_id) is waiter:
                del self._waiters[model.model_id]

    def reason(self, model: Model) -> str | None:
        """What a model waits for that was in the line at the latest look."""
        if self._turns is None:
            self._turns = {one.model_id: number for number, one in enumerate(fair_order(self._line), 1)}
        number = self._turns.get(model.model_id)
        if self._trouble is not None or number is None:
            return self._trouble
        slots = sum(self._places().slots.values())
        wait = Wait(number, len(self._turns), slots, model.base_model, model.tenant)
        next_step = self._next_steps.get((model.base_model, model.lora_rank), "")
        return wait.sentence(self._line.holders, next_step, self._clock())

    async def look(self) -> None:
        """Sees who waits, and for what."""
        await self._look(self._places())

    async def close(self) -> None:
        if self._rounds is not None:
            self._rounds.cancel()
            await asyncio.gather(self._rounds, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiters:
            seen = self._fleet.changes.count, self._freed.count
            try:
                gave = await self._round()
                self._trouble = None
            except TinsmithError as error:
                gave, self._trouble = False, str(error)
            except Exception as error:
                # Whatever it was, those who wait must not wait for ever.
                log.exception("no places given", base_model=self._weights)
                gave, self._trouble = False, repr(error)
            if self._waiters and not gave:
                await self._pause(*seen)

    async def _round(self) -> bool:
        """Whether there was something to give, and so may be more: to somebody here, or to one whom another replica
        has in hand just now."""
        asked, places = dict(self._waiters), self._places()
        if self._there_was_room and await self._give(asked, places):
            return True
        waiting, wanted = await self._look(places)
        if wanted:
            if not await self._give(asked, places):
                await asyncio.sleep(CONTEST_SECONDS)
            return True
        await self._wake_settled(asked, waiting)
        await self._ask_for_more()
        return False

    async def _give(self, asked: dict[str, _Waiter], places: Places) -> bool:
        given = await self._store.give_places(self._names(), places.slots, lambda line: share_out(line, places))
        for model_id in given.keys() & asked.keys():
            self._wake(asked[model_id], replace(asked[model_id].model, worker_id=given[model_id]))
        self._there_was_room = bool(given)
        return self._there_was_room

    async def _wake_settled(self, asked: dict[str, _Waiter], waiting: Collection[str]) -> None:
        """Those whom another replica has placed, or whose session has ended."""
        for model_id in asked.keys() - set(waiting):
            waiter = asked[model_id]
            if not waiter.placed.done():
                model = await self._store.get_model(model_id)
                self._wake(waiter, model or replace(waiter.model, state="failed"))

    def _wake(self, waiter: _Waiter, model: Model) -> None:
        """It waits no more, though it has not come to run: a round for it would find nothing, and who came meanwhile
        would wait for the one behind."""
        if not waiter.placed.done():
            waiter.placed.set_result(model)
        if self._waiters.get(model.model_id) is waiter:
            del self._waiters[model.model_id]

    async def _ask_for_more(self) -> None:
        """Asks for more capacity, once for each kind of model, and notes what happens next."""
        kinds = {(waiter.model.base_model, waiter.model.lora_rank) for waiter in self._waiters.values()}
        for base_model, rank in sorted(kinds):
            self._next_steps[base_model, rank] = await self._fleet.provide(base_model, rank=rank)

    async def _pause(self, changes_seen: int, freed_seen: int) -> None:
        await asyncio.sleep(min(BREATHER_SECONDS, RECHECK_SECONDS))
        news = [
            asyncio.create_task(self._fleet.changes.beyond(changes_seen)),
            asyncio.create_task(self._freed.beyond(freed_seen)),
        ]
        try:
            await asyncio.wait(news, timeout=RECHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in news:
                one.cancel()

    async def _look(self, places: Places) -> tuple[Collection[str], Collection[str]]:
        """Who waits, and to whom of them there is a place to give: those are on their way, and have no turn."""
        line = await self._store.line(self._names(), places.slots)
        wanted = share_out(line, places)
        left = tuple(one for one in line.waiting if one.model_id not in wanted)
        self._line, self._turns = replace(line, waiting=left), None
        return [one.model_id for one in line.waiting], wanted

    def _names(self) -> list[str]:
        """All names under which models of this line may have been asked for."""
        return [served.name for served in self._fleet.models if served.weights == self._weights] or [self._weights]

    def _places(self) -> Places:
        workers = {one.worker_id: one for name in self._names() for one in self._fleet.trainers(name, rank=0)}
        return Places(
            slots={worker_id: worker.slots for worker_id, worker in workers.items()},
            suits=lambda name, rank: [worker.worker_id for worker in self._fleet.trainers(name, rank)],
            kept=self._kept,
            refused_by={model_id: waiter.refused_by for model_id, waiter in self._waiters.items()},
        )
