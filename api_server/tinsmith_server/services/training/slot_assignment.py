"""The order of a placement queue, the assignment of slots, and the message for a client that waits.

This module only makes decisions, and `placement.py` carries them out. The next slot goes to the oldest model of the
tenant that holds the fewest slots. So a tenant that wants a thousand slots does not delay other tenants. A model never
loses its slot to another model.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tinsmith_server.store.records import PlacementQueue, QueuedModel, SlotHolder

Suits = Callable[[str, int], Collection[str]]
"""A function that returns the workers that take a model of this base model and LoRA rank."""

SESSIONS_NAMED = 3


@dataclass(frozen=True, slots=True)
class Capacity:
    """The slots of each worker, and the models that each worker takes.

    The last `kept` slots are reserved for tenants that hold no slot and have a session.
    """

    slots: Mapping[str, int]
    suits: Suits
    kept: int = 0
    refused_by: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.slots.values())


def fair_order(queue: PlacementQueue, place: Callable[[QueuedModel], bool] = lambda _: True) -> list[QueuedModel]:
    """Return all waiting models in fair order.

    If `place` returns False for a model, the model does not count against its tenant's share.
    """
    waiting: defaultdict[str, deque[tuple[int, QueuedModel]]] = defaultdict(deque)
    for number, one in enumerate(queue.waiting):
        waiting[one.tenant].append((number, one))
    held = Counter(holder.tenant for holder in queue.holders)
    turns = [(held[tenant], models[0][0], tenant) for tenant, models in waiting.items()]
    heapq.heapify(turns)
    ordered = []
    while turns:
        served, _, tenant = heapq.heappop(turns)
        _, one = waiting[tenant].popleft()
        ordered.append(one)
        served += place(one)
        if waiting[tenant]:
            heapq.heappush(turns, (served, waiting[tenant][0][0], tenant))
    return ordered


def assign_slots(queue: PlacementQueue, capacity: Capacity) -> Mapping[str, str]:
    """Return the models that get a slot now, with their workers."""
    used = Counter(holder.worker_id for holder in queue.holders)
    held = Counter(holder.tenant for holder in queue.holders)
    free = {
        worker_id: slots - used[worker_id] for worker_id, slots in capacity.slots.items() if slots > used[worker_id]
    }
    without_room: set[tuple[str, int]] = set()
    assignments: dict[str, str] = {}

    def place(one: QueuedModel) -> bool:
        kind = (one.base_model, one.lora_rank)
        if not free or kind in without_room or sum(free.values()) <= _kept_from(one.tenant, held, queue, capacity):
            return False
        suitable = free.keys() & set(capacity.suits(*kind))
        if not suitable:
            without_room.add(kind)
            return False
        worker_id = _fullest(suitable, free, capacity.refused_by.get(one.model_id, ()))
        free[worker_id] -= 1
        if not free[worker_id]:
            del free[worker_id]
        held[one.tenant] += 1
        assignments[one.model_id] = worker_id
        return True

    fair_order(queue, place)
    return assignments


def _kept_from(tenant: str, held: Mapping[str, int], queue: PlacementQueue, capacity: Capacity) -> int:
    """Return the number of free slots that this tenant must leave for tenants without slots."""
    newcomers = [other for other in queue.tenants_at_work if other != tenant and not held.get(other)]
    return min(capacity.kept, capacity.total - 1) if held.get(tenant) and newcomers else 0


def _fullest(workers: Collection[str], free: Mapping[str, int], refused_by: Collection[str]) -> str:
    """Return the worker with the fewest free slots.

    This choice fills some workers and empties others, which frees whole GPUs.
    """
    return min(workers, key=lambda worker_id: (worker_id in refused_by, free[worker_id], worker_id))


@dataclass(frozen=True, slots=True)
class Wait:
    """The reason why a model waits, and its number in the queue, from 1. A field is None if it is not known."""

    reason: str | None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """The position of one model in its queue. `total` and `slots` describe the whole queue."""

    number: int
    total: int
    slots: int
    base_model: str
    tenant: str

    def sentence(self, holders: Sequence[SlotHolder], next_step: str, now: datetime) -> str:
        """Return the message for the tenant of the model.

        About other tenants, the message tells only the number of slots that they hold.
        """
        turn = f"{_ordinal(self.number)} of {self.total} waiting" if self.total > 1 else "waiting"
        goal = f"one of {self.slots} places" if self.slots else "a worker"
        return "; ".join(
            [f"{turn} for {goal} of {self.base_model}", *self._held(holders, now), *filter(None, [next_step])]
        )

    def _held(self, holders: Sequence[SlotHolder], now: datetime) -> list[str]:
        own = [holder for holder in holders if holder.tenant == self.tenant]
        others = len(holders) - len(own)
        by_own = [f"{len(own)} held by your {_sessions(own, now)}"] if own else []
        return by_own + ([f"{others} held by other tenants"] if others else [])


def _sessions(own: Sequence[SlotHolder], now: datetime) -> str:
    """Return the sessions of the slot holders as text.

    The first session is the session that has been idle longest, because the user should end this session first.
    """
    last: dict[str, datetime] = {}
    for holder in own:
        last[holder.session_id] = max(holder.last_request_at, last.get(holder.session_id, holder.last_request_at))
    by_idleness = sorted(last, key=lambda session_id: last[session_id])
    named = ", ".join(by_idleness[:SESSIONS_NAMED])
    more = f" and {len(by_idleness) - SESSIONS_NAMED} more" if len(by_idleness) > SESSIONS_NAMED else ""
    if len(by_idleness) == 1:
        return f"session {named}, idle for {_duration(now - last[by_idleness[0]])}"
    return f"sessions {named}{more}, the first of them idle for {_duration(now - last[by_idleness[0]])}"


def _duration(elapsed: timedelta) -> str:
    seconds = max(0, int(elapsed.total_seconds()))
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
