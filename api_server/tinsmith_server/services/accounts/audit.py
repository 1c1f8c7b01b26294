"""The audit log of a tenant: changes of its checkpoints, keys and limits, each with the key that made the change.

Each change writes an entry. Entries are read by day. A save reaches the store when its worker reports it, so the entry
of a save names the key that opened the session of the run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Literal

from tinsmith_server.errors import Unprocessable
from tinsmith_server.services.accounts.callers import STATIC_KEY, Caller, signed
from tinsmith_server.store.records import AuditEntry, AuditKind, Checkpoint, Clock, Usage, utc_now
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
KINDS: dict[str, AuditKind] = {"all": "all", "checkpoints": "checkpoints", "organizations": "accounts"}
"""The kinds of entries by the vendor's event types. A tenant is what the vendor calls an organization."""
EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]

SAVED: CheckpointEvent = "checkpoint_saved"
ENTRIES_AT_ONCE = 500


def entry(checkpoint: Checkpoint, event: CheckpointEvent, at: datetime, **details: Any) -> AuditEntry:
    """Return the entry for a named checkpoint, with the key of the current request."""
    return _entry(checkpoint, event, at, signed(details))


def _entry(checkpoint: Checkpoint, event: CheckpointEvent, at: datetime, details: dict[str, Any]) -> AuditEntry:
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
    details = {"size_bytes": checkpoint.size_bytes}
    # The current request may be a poll of another client, which only happens to fetch the worker's report of a save.
    details = details if event == SAVED else signed(details)
    return _entry(checkpoint, event, made, details), counted


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
            kind = KINDS.get(event_type)
            if kind is None:
                return ()
            found = await self._store.list_audit(tenant, start, end, after, ENTRIES_AT_ONCE, kind)
            return await self._signed_by_session(tenant, found)

        first = await page(None)

        async def pages() -> AsyncIterator[Sequence[AuditEntry]]:
            some = first
            while some:
                yield some
                some = await page(some[-1])

        return pages()

    async def _signed_by_session(self, tenant: str, entries: Sequence[AuditEntry]) -> Sequence[AuditEntry]:
        """Add the key of the session to the entry of each save."""
        runs = {one.model_id: session_of(one.model_id) for one in entries if one.event == SAVED}
        sessions = await self._store.sessions_by_id(tenant, set(runs.values())) if runs else ()
        key_of = {session.session_id: session.key_id for session in sessions}
        keys = {key.key_id: Caller.of(key) for key in await self._store.list_keys(tenant)} if runs else {}
        keys[STATIC_KEY.key_id] = STATIC_KEY

        def with_key(one: AuditEntry) -> AuditEntry:
            key_id = key_of.get(runs[one.model_id]) if one.event == SAVED else None
            caller = keys.get(key_id) if key_id is not None else None
            return one if caller is None else replace(one, details={**one.details, "key": caller.signature})

        return [with_key(one) for one in entries]


def _day(day: date) -> tuple[datetime, datetime]:
    try:
        start = datetime.combine(day, time(), UTC)
        return start, start + timedelta(days=1)
    except OverflowError:
        raise Unprocessable(f"the audit log has no day {day}") from None
