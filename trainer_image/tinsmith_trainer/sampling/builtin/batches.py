"""The open decode batches within the memory for keys and values, and the samples that wait for a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from tinsmith_trainer.sampling.builtin.batch import BatchKey, BatchPlan
from tinsmith_trainer.sampling.builtin.claims import (
    HeldMemory,
    co_batched_tenants,
    give_up_memory,
    gives_up_a_row,
    next_for_a_row,
)
from tinsmith_trainer.sampling.builtin.jobs import Sample
from tinsmith_trainer.sampling.builtin.model_cache.choice import AnyBatch, SamplerForward, open_batch
from tinsmith_trainer.sampling.builtin.prefix_cache import SharedPrefixes
from tinsmith_trainer.sampling.tenant_shares import FairQueue


class OutOfMemoryForNow(Exception):
    """An error for a batch that cannot open until running batches have ended."""


class Batches:
    """The batches of a sampler.

    A batch is opened when the first sample needs this batch. If rows are scarce, tenants get equal numbers of rows. If
    a sample loses a row to another tenant, the sample's keys and values are kept outside the batch. Among samples of
    the same tenant, the parked sample gets a row first.
    """

    def __init__(self, plan: BatchPlan, forward: SamplerForward, turns: FairQueue, shared: SharedPrefixes) -> None:
        self.plan = plan
        self._shared = shared
        self._forward = forward
        self._fair_queue = turns
        self._open: dict[BatchKey, AnyBatch] = {}
        self._queues: dict[BatchKey, dict[str, deque[Sample]]] = {}
        self._parked: dict[Sample, int] = {}  # bytes of each parked sample
        self._short: set[str] = set()

    @property
    def active(self) -> list[AnyBatch]:
        """The batches that contain samples."""
        return [batch for batch in self._open.values() if batch.samples]

    def of(self, tenant: str) -> list[AnyBatch]:
        """Return the batches in which the tenant has rows."""
        return [batch for batch in self._open.values() if batch.rows_by_tenant[tenant]]

    def may_start(self, key: BatchKey, tenant: str, promised: int = 0) -> bool:
        """Return whether a new sample of this key would start now, if `promised` rows are reserved for the same tenant.

        Raises OutOfMemoryForNow if the new sample, or an earlier sample of the tenant, waits for memory. While a sample
        waits for memory, no new sample of the same tenant starts, because the waiting sample would then never start.
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

    def has_room_for_shared(self, nbytes: int) -> bool:
        """Return whether the memory has room for values that are shared while samples run.

        The first shared values always have room.
        """
        return self._excess_bytes(nbytes) <= 0 or not self._shared.nbytes

    def enqueue(self, sample: Sample) -> None:
        """Queue a sample for a row, after the sample's keys and values were computed."""
        self._queue_of(sample).append(sample)

    def fill(self) -> None:
        """Move queued samples into free rows. Record which tenants wait for memory."""
        self._short.clear()
        order = {tenant: position for position, tenant in enumerate(self._fair_queue.order())}
        for key in sorted(self._queues, key=lambda key: min(order[tenant] for tenant in self._queues[key])):
            self._fill(key)

    def co_batched(self, batch: AnyBatch, tenant: str) -> frozenset[str]:
        """Return the tenants that share a step in this tenant's turn.

        Each tenant pays only for the tenant's own rows.
        """
        rows = batch.rows_by_tenant
        chosen = co_batched_tenants(rows, tenant, batch.cost)
        together = sum(rows[one] for one in chosen)
        each = batch.cost(together) / together
        for one in chosen:
            self._fair_queue.charge(one, each * rows[one])
        return chosen

    def discard(self, batch: AnyBatch) -> None:
        """Close a batch after a step of the batch has failed."""
        self._open.pop(batch.key, None)

    def remove_finished(self) -> None:
        """Forget samples of jobs that have ended."""
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
            self._open[key].put(sample)
            self._tidy(key, tenant)

    def _next_in(self, key: BatchKey) -> str | None:
        """Return the tenant that gets a row for a sample, and free a row if needed.

        Return None if no sample gets a row.
        """
        waiting = [tenant for tenant in self._fair_queue.order() if tenant in self._queues[key]]
        rows = self._open[key].rows_by_tenant if key in self._open else {}
        for tenant in next_for_a_row(waiting, rows):
            if key not in self._open and not self._open_batch(key, tenant):
                self._short.add(tenant)
            elif self._open[key].free_rows or self._make_row(self._open[key], tenant):
                return tenant
        return None

    def _make_row(self, batch: AnyBatch, tenant: str) -> bool:
        """Free a row of the tenant with the most rows: the latest job's row, so that earlier jobs end first."""
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
        return gives_up_a_row(batch.rows_by_tenant, tenant, self._fair_queue.lead, self._fair_queue.credit)

    def _park(self, batch: AnyBatch, samples: Collection[Sample]) -> None:
        """Park the samples.

        Parked samples keep their order; among samples of the same tenant, parked samples get rows first.
        """
        for sample in sorted(samples, key=lambda sample: (sample.run.serial, sample.index), reverse=True):
            batch.park(sample)
            self._parked[sample] = self.plan.filled_bytes(sample)
            self._queue_of(sample).appendleft(sample)

    def _room_to_park(self) -> int:
        """Return the number of bytes for parked samples in the host's memory.

        The space for parked samples is equal to the memory of batches, but at least the size of one whole context.
        """
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
        """Return how many bytes a new batch still lacks after all idle batches are closed."""
        held = sum(batch.nbytes for batch in self.active) + self._shared.nbytes
        return held + needed_bytes - self.plan.settings.kv_cache_bytes

    def _used_bytes(self) -> int:
        return sum(batch.nbytes for batch in self._open.values()) + self._shared.nbytes

    def _leaving(self, needed_bytes: int, tenant: str) -> list[AnyBatch]:
        """Return the batches of other tenants that must close for a new batch.

        The result is empty if the new batch has room, or if no other batch must close.
        """
        excess = self._excess_bytes(needed_bytes)
        if excess <= 0 or self.of(tenant):
            return []
        active = self.active
        held = [HeldMemory(batch.nbytes, batch.filled_bytes(), batch.rows_by_tenant) for batch in active]
        leaving = give_up_memory(
            held, excess, self._room_to_park(), tenant, self._fair_queue.lead, self._fair_queue.credit
        )
        return [active[position] for position in leaving]

    def _close_idle(self, needed_bytes: int) -> None:
        """Close idle batches until a new batch fits.

        A batch that never fits may still open if no other batch is open.
        """
        for key, batch in list(self._open.items()):
            if self._used_bytes() + needed_bytes <= self.plan.settings.kv_cache_bytes:
                return
            if not batch.samples:
                del self._open[key]
