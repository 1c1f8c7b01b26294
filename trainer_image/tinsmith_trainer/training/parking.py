"""Parking of adapters. A worker has more models than slots, and only the adapters in use are in the engine.

A parked adapter exists only as a snapshot. A parked adapter returns to memory when the model has a turn. If all slots
are in use, another adapter must leave first. If the leaving adapter has changed, a snapshot is saved and recorded in
the journal before the adapter is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import structlog
from tinsmith_rpc import worker_pb2

from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.errors import JournalFull
from tinsmith_trainer.oplog.model_queue import Entry, ModelQueue
from tinsmith_trainer.oplog.model_queues import ModelQueues, Ready
from tinsmith_trainer.process.failpoints import reach
from tinsmith_trainer.training.residency import Residency, ResidencyRules, Stay
from tinsmith_trainer.training.restoring import Restorer
from tinsmith_trainer.training.snapshotting import ModelSnapshots

log = structlog.get_logger(__name__)

SAVED_AGAIN_AFTER_SECONDS = 5.0
"""The minimum time for which an adapter stays in memory after a failed save.

During this time, another adapter may leave.
"""


@dataclass(slots=True)
class ParkingFigures:
    """Counters since the start of the process."""

    evicted: int = 0
    eviction_seconds: float = 0.0
    restored: int = 0
    restore_seconds: float = 0.0

    def exchange_seconds(self) -> float:
        """Return the average time of an exchange, in which one adapter leaves and another adapter returns."""
        out = self.eviction_seconds / self.evicted if self.evicted else 0.0
        back = self.restore_seconds / self.restored if self.restored else 0.0
        return out + back


@dataclass(slots=True)
class _Slot:
    """A slot that an adapter uses. Times are on the monotonic clock."""

    tenant: str
    since: float
    used_at: float
    not_before: float = 0.0


class Parking:
    """The slots of the engine. Only the engine's thread changes slots; other threads may read slots."""

    def __init__(
        self,
        engine: Engine,
        queues: ModelQueues,
        snapshots: ModelSnapshots,
        restorer: Restorer,
        *,
        active: Sequence[Container[str]],
        rules: ResidencyRules,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the slots. The collections in `active` contain the models with an operation in progress."""
        self.figures = ParkingFigures()
        self._slots = engine.capabilities().adapter_slots
        self._engine = engine
        self._queues = queues
        self._snapshots = snapshots
        self._restorer = restorer
        self._active = active
        self._rules = rules
        self._clock = clock
        self._taken: dict[str, _Slot] = {}
        self._busy: frozenset[str] = frozenset()  # models that have an operation to run now
        self._problem: str | None = None

    # ---- looking

    def holds(self, queue: ModelQueue) -> bool:
        """Return whether the model's adapter is in memory."""
        return queue.model_id in self._taken

    def is_parked(self, queue: ModelQueue) -> bool:
        return queue.holds_a_place and not self.holds(queue)

    def problem_of(self, queue: ModelQueue) -> str | None:
        """Return why the model does not continue, if an administrator must act, otherwise None."""
        return queue.quarantined or queue.held_because or (None if self.holds(queue) else self._problem)

    def among(self, ready: Sequence[Ready]) -> tuple[Sequence[Ready], float]:
        """See `Room`."""
        self._busy = frozenset(queue.model_id for queue, _, _ in ready)
        # All new models of a tenant wait for the same slot. All other models of the tenant wait for one slot, too.
        kinds = {(queue.owner, queue.has_adapter): queue for queue, _, _ in ready if not self.holds(queue)}
        seconds = {kind: self._seconds_until_room_for(queue) for kind, queue in kinds.items()}
        fitting = [
            (queue, turn, entry)
            for queue, turn, entry in ready
            if self.holds(queue) or not seconds[queue.owner, queue.has_adapter] or self._may_exceed(entry)
        ]
        return fitting, min(seconds.values(), default=math.inf)

    def _seconds_until_room_for(self, queue: ModelQueue) -> float:
        return 0.0 if self._has_free_slot() else self._residency_for(queue).seconds_until_one_leaves()

    def _has_free_slot(self) -> bool:
        return len(self._taken) < self._slots

    def _residency_for(self, queue: ModelQueue) -> Residency:
        stays = [
            Stay(
                model_id=model_id,
                tenant=slot.tenant,
                since=slot.since,
                used_at=slot.used_at,
                busy=model_id in self._busy,
                pinned=any(model_id in work for work in self._active),
                not_before=slot.not_before,
            )
            for model_id, slot in self._taken.items()
        ]
        seconds = self.figures.exchange_seconds()
        return Residency(stays, self._clock(), seconds, self._rules, queue.owner, is_new=not queue.has_adapter)

    # ---- acting

    def at_start(self, queues: Sequence[ModelQueue]) -> None:
        """Restore models from the journal: first models with work, then the most recently used models.

        All other models stay parked.

        A model without a snapshot is replayed from the first operation.
        """
        parked = [queue for queue in queues if queue.is_open and queue.snapshot and self._restorer.is_sound(queue)]
        parked.sort(key=lambda queue: (queue.order.waiting_count > 0, queue.last_accepted_at), reverse=True)
        for queue in reversed(parked[: self._slots]):
            if not self._queues.is_stopping:
                self._restore(queue)

    def _may_exceed(self, entry: Entry) -> bool:
        """Return whether the operation may exceed the number of slots. Only a release may exceed the number of slots.

        If adapters cannot be saved because the volume is full, a release frees space.
        """
        return (
            self._problem is not None
            and entry.operation.kind == worker_pb2.RELEASE_MODEL
            and len(self._taken) == self._slots
        )

    def make_resident(self, queue: ModelQueue, entry: Entry) -> bool:
        """Bring the model's adapter into memory before a turn, or reserve a slot for a new adapter.

        Return False if no slot can be freed now.
        """
        if self.holds(queue):
            return True
        while not (self._has_free_slot() or self._may_exceed(entry)):
            leaver = self._residency_for(queue).leaver()
            if leaver is None:
                return False
            self._park(leaver.model_id)
        if queue.has_adapter:
            return self._restore(queue)
        self._take_slot(queue)
        return True

    def used(self, queue: ModelQueue) -> None:
        """Note that a turn of the model has ended now."""
        slot = self._taken.get(queue.model_id)
        if slot is not None:
            slot.used_at = self._clock()

    def free(self, queue: ModelQueue) -> None:
        """Free the slot of an adapter that was deleted, or that was never created."""
        self._engine.drop(queue.model_id)
        self._taken.pop(queue.model_id, None)

    def _restore(self, queue: ModelQueue) -> bool:
        started = time.perf_counter()
        if not self._restorer.restore(queue):
            return False
        self.figures.restored += 1
        self.figures.restore_seconds += time.perf_counter() - started
        self._take_slot(queue)
        return True

    def _take_slot(self, queue: ModelQueue) -> None:
        now = self._clock()
        self._taken[queue.model_id] = _Slot(queue.owner, now, now)
        self._problem = None

    def _park(self, model_id: str) -> None:
        """Park the adapter. An adapter that cannot be saved stays in memory, and another adapter may be chosen."""
        queue = self._queues.find(model_id)
        assert queue is not None, f"{model_id} has a slot and no queue"
        started = time.perf_counter()
        try:
            self._snapshots.save_if_changed(queue, before_journal=lambda: reach("park-before-journal"))
        except Exception as error:
            log.warning("adapter cannot be parked", model_id=model_id, reason=str(error) or type(error).__name__)
            self._taken[model_id].not_before = self._clock() + SAVED_AGAIN_AFTER_SECONDS
            self._problem = self._why_none_leaves(error)
            return
        reach("park-before-drop")
        self.free(queue)
        self.figures.evicted += 1
        self.figures.eviction_seconds += time.perf_counter() - started
        log.debug("adapter parked", model_id=model_id)

    def _why_none_leaves(self, error: Exception) -> str:
        """Return the reason why no adapter leaves.

        Clients of other tenants see the reason, so the reason names no model.
        """
        what = "has no room for" if isinstance(error, JournalFull) else "could not take"
        return (
            f"all {self._slots} adapter slots of this worker are in use, and its volume {what} the snapshot that would "
            "free one. Nothing is lost: the model continues when there is space on the volume, or when a session ends"
        )
