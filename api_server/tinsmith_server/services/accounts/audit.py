"""The audit log of a tenant's checkpoints. Each change of a checkpoint writes an entry. Entries are read by day."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Literal

from tinsmith_server.errors import Unprocessable
from tinsmith_server.store.records import AuditEntry, Checkpoint, Clock, Usage, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import KIND_OF_TYPE, TinkerPath, session_of

CheckpointEvent = Literal[
    "checkpoint_saved",
    "checkpoint_imported",
    "checkpoint_copied",
    "checkpoint_published",
    "checkpoint_unpublished",
    "checkpoint_ttl_set",
    "checkpoint_deleted",
    "checkpoint_promoted",
    "checkpoint_demoted",
]
EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]

ENTRIES_AT_ONCE = 500


def entry(checkpoint: Checkpoint, event: CheckpointEvent, at: datetime, **details: Any) -> AuditEntry:
    """Return the entry for a named checkpoint."""
    path = TinkerPath(checkpoint.run_id, KIND_OF_TYPE[checkpoint.type], checkpoint.name)
    entry_details = {"tenant": checkpoint.tenant, "checkpoint_type": checkpoint.type, **details}
    return AuditEntry(checkpoint.tenant, at, event, checkpoint.run_id, str(path), entry_details)


def of_new(checkpoint: Checkpoint, event: CheckpointEvent) -> tuple[AuditEntry | Usage, ...]:
    """Return the rows that are written together with a new named checkpoint: an audit entry and usage.

    For an unnamed checkpoint, return no rows.
    """
    if checkpoint.type == "ephemeral":
        return ()
    made = checkpoint.created_at
    hour = made.replace(minute=0, second=0, microsecond=0)
    counted = Usage(checkpoint.tenant, session_of(checkpoint.run_id), checkpoint.base_model, hour, "checkpoint", 1)
    return entry(checkpoint, event, made, size_bytes=checkpoint.size_bytes), counted


class AuditLog:
    """The audit log. Each tenant can read only its own entries."""

    def __init__(self, store: Store, clock: Clock = utc_now) -> None:
        self._store = store
        self._clock = clock

    async def of_day(self, tenant: str, event_type: EventType, day: date | None) -> AsyncIterator[Sequence[AuditEntry]]:
        """Yield the entries of a UTC day in batches, oldest first. The default is today.

        Raises Unprocessable for a day outside of the calendar.
        """
        start, end = _day(day or self._clock().astimezone(UTC).date())

        async def page(after: AuditEntry | None) -> Sequence[AuditEntry]:
            if event_type not in ("all", "checkpoints"):
                return ()
            return await self._store.list_audit(tenant, start, end, after, ENTRIES_AT_ONCE)

        first = await page(None)

        async def pages() -> AsyncIterator[Sequence[AuditEntry]]:
            some = first
            while some:
                yield some
                some = await page(some[-1])

        return pages()


def _day(day: date) -> tuple[datetime, datetime]:
    try:
        start = datetime.combine(day, time(), UTC)
        return start, start + timedelta(days=1)
    except OverflowError:
        raise Unprocessable(f"the audit log has no day {day}") from None
