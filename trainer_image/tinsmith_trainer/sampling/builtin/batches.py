"""The open decode batches, within the memory for keys and values, and the samples that wait for a row of one."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from tinsmith_trainer.sampling.builtin.batch import BatchKey, BatchPlan
from tinsmith_trainer.sampling.builtin.claims import (
    HeldMemory,
    company,
    give_up_memory,
    gives_up_a_row,
    next_for_a_row,
)
from tinsmith_trainer.sampling.builtin.jobs import Sample
from tinsmith_trainer.sampling.builtin.model_cache.choice import AnyBatch, SamplerForward, open_batch
from tinsmith_trainer.sampling.builtin.prefix_cache import SharedPrefixes
from tinsmith_trainer.sampling.tenant_shares import FairQueue


class OutOfMemoryForNow(Exception):
    """A batch cannot open until running ones have ended."""


class Batches:
    """Opens a batch when a sample needs it, and gives rows to tenants in equal numbers where they are short.

    A sample whose row goes to another tenant keeps its keys and values, outside of a batch, and is the next of its
    tenant's.
    """

    def __init__(self, plan: BatchPlan, forward: SamplerForward, turns: FairQueue, shared: SharedPrefixes) -> None:
        self.plan = plan
        self._shared = shared
        self._forward = forward
        self._turns = turns
        self._open: dict[BatchKey, AnyBatch] = {}
        self._queues: dict[BatchKey, dict[str, deque[Sample]]] = {}
        self._parked: dict[Sample, int] = {}  # bytes
        self._short: set[str] = set()

    @property
    def active(self) -> list[AnyBatch]:
        """Batches with samples in them."""
        return [batch for batch in self._open.values() if batch.samples]

    def of(self, tenant: str) -> list[AnyBatch]:
        """Those in which a tenant has rows."""
        return [batch for batch in self._open.values() if batch.rows_by_tenant[tenant]]

    def may_start(self, key: BatchKey, tenant: str, promised: int = 0) -> bool:
        """Whether a new sample of this key would start at once, beside so many rows that are promised to the tenant.

        Raises OutOfMemoryForNow if it waits for memory, or an earlier one of the tenant's does: rows that run now will
        end, and until then nothing of the tenant's starts, or the one that waits never would.
        """
        if tenant in self._short:
            raise OutOfMemoryForNow
        if self._queues.get(key, {}).get(tenant):
            return False
        batch = self._open.get(key)
        if batch is not None:
            return batch.free_rows > promised or (not promised and self._giver(batch, tenant) is not None)
        if not self._could_open(key, tenant):
            raise OutOfMemoryForNow
        return promised < self.plan.rows(key.extent)

    def has_room_beside_rows(self, nbytes: int) -> bool:
        """For what is kept as long as samples run, or nothing of the kind is kept."""
        return self._excess_bytes(nbytes) <= 0 or not self._shared.nbytes

    def enqueue(self, sample: Sample) -> None:
        """Takes a sample that has its keys and values."""
        self._queue_of(sample).append(sample)

    def fill(self) -> None:
        """Moves queued samples into rows, and notes whose wait for memory."""
        self._short.clear()
        places = {tenant: place for place, tenant in enumerate(self._turns.order())}
        for key in sorted(self._queues, key=lambda key: min(places[tenant] for tenant in self._queues[key])):
            self._fill(key)

    def company(self, batch: AnyBatch, tenant: str) -> frozenset[str]:
        """Whose samples are drawn together with a tenant's, in its turn. Each pays for its rows."""
        rows = batch.rows_by_tenant
        chosen = company(rows, tenant, batch.cost)
        together = sum(rows[one] for one in chosen)
        each = batch.cost(together) / together
        for one in chosen:
            self._turns.charge(one, each * rows[one])
        return chosen

    def discard(self, batch: AnyBatch) -> None:
        """Closes a batch whose step failed."""
        self._open.pop(batch.key, None)

    def remove_finished(self) -> None:
        """Forgets samples whose job has ended."""
        for batch in self._open.values():
            batch.remove_finished()
        self._parked = {sample: nbytes for sample, nbytes in self._parked.items() if not sample.run.finished}
        for key, queues in list(self._queues.items()):
            for tenant, queue in list(queues.items()):
                queues[tenant] = deque(sample for sample in queue if not sample.run.finished)
                self._tidy(key, tenant)

    def _queue_of(self, sample: Sample) -> deque[Sample]:
        key = self.plan.key(sample.own_position, sample.run.adapter)
        return self._queues.setdefault(key, {}).setdefault(sample.run.job.tenant, deque())

    def _tidy(self, key: BatchKey, tenant: str) -> None:
        if not self._queues[key][tenant]:
            del self._queues[key][tenant]
        if not self._queues[key]:
            del self._queues[key]

    def _fill(self, key: BatchKey) -> None:
        while key in self._queues and (tenant := self._next_in(key)) is not None:
            sample = self._queues[key][tenant].popleft()
            self._parked.pop(sample, None)
            self._open[key].place(sample)
            self._tidy(key, tenant)

    def _next_in(self, key: BatchKey) -> str | None:
        """The tenant whose sample gets a row now, which is free then."""
        waiting = [tenant for tenant in self._turns.order() if tenant in self._queues[key]]
        rows = self._open[key].rows_by_tenant if key in self._open else {}
        for tenant in next_for_a_row(waiting, rows):
            if key not in self._open and not self._open_batch(key, tenant):
                self._short.add(tenant)
            elif self._open[key].free_rows or self._make_row(self._open[key], tenant):
                return tenant
        return None

    def _make_row(self, batch: AnyBatch, tenant: str) -> bool:
        """Of the tenant that has most: the row of its latest job, so that the earlier ones end first."""
        giver = self._giver(batch, tenant)
        if giver is None:
            return False
        latest = max(
            (sample for sample in batch.samples if sample.run.job.tenant == giver),
            key=lambda sample: (sample.run.serial, sample.index),
        )
        self._park(batch, [latest])
        return True

    def _giver(self, batch: AnyBatch, tenant: str) -> str | None:
        if self._room_to_park() <= 0:
            return None
        return gives_up_a_row(batch.rows_by_tenant, tenant, self._turns.lead, self._turns.credit)

    def _park(self, batch: AnyBatch, samples: Collection[Sample]) -> None:
        """They are the next of their tenants', in their order."""
        for sample in sorted(samples, key=lambda sample: (sample.run.serial, sample.index), reverse=True):
            batch.park(sample)
            self._parked[sample] = self.plan.filled_bytes(sample)
            self._queue_of(sample).appendleft(sample)

    def _room_to_park(self) -> int:
        """As much again as batches take, in the host's memory; at least a whole context, where they take less."""
        context = self.plan.geometry.row_bytes(self.plan.max_sequence_length)
        return max(self.plan.settings.kv_cache_bytes, 2 * context) - sum(self._parked.values())

    def _open_batch(self, key: BatchKey, tenant: str) -> bool:
        needed = self.plan.nbytes(key.extent)
        for batch in self._leaving(needed, tenant):
            self._park(batch, batch.samples)
        self._close_idle(needed)
        if self.active and self._used_bytes() + needed > self.plan.settings.kv_cache_bytes:
            return False
        self._open[key] = open_batch(key, self.plan, self._forward)
        return True

    def _could_open(self, key: BatchKey, tenant: str) -> bool:
        needed = self.plan.nbytes(key.extent)
        return self._excess_bytes(needed) <= 0 or not self.active or bool(self._leaving(needed, tenant))

    def _excess_bytes(self, needed_bytes: int) -> int:
        """What is missing for a batch even where idle ones are closed."""
        held = sum(batch.nbytes for batch in self.active) + self._shared.nbytes
        return held + needed_bytes - self.plan.settings.kv_cache_bytes

    def _used_bytes(self) -> int:
        return sum(batch.nbytes for batch in self._open.values()) + self._shared.nbytes

    def _leaving(self, needed_bytes: int, tenant: str) -> list[AnyBatch]:
        """Batches of others that make room for one; none if there is room, or they do not have to."""
        excess = self._excess_bytes(needed_bytes)
        if excess <= 0 or self.of(tenant):
            return []
        active = self.active
        held = [HeldMemory(batch.nbytes, batch.filled_bytes(), batch.rows_by_tenant) for batch in active]
        leaving = give_up_memory(held, excess, self._room_to_park(), tenant, self._turns.lead, self._turns.credit)
        return [active[place] for place in leaving]

    def _close_idle(self, needed_bytes: int) -> None:
        """Until a new batch fits; one that fits never may still open alone."""
        for key, batch in list(self._open.items()):
            if self._used_bytes() + needed_bytes <= self.plan.settings.kv_cache_bytes:
                return
            if not batch.samples:
                del self._open[key]
