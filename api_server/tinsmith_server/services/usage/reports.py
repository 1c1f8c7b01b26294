"""Reports of a tenant's hourly usage and stored data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import orjson

from tinsmith_server.errors import Unprocessable
from tinsmith_server.store.records import Clock, Session, StoredCheckpoints, Usage, utc_now
from tinsmith_server.store.store import Store

LONGEST_WINDOW = timedelta(days=14)
MOST_ROWS = 20_000
SESSIONS_AT_ONCE = 200
# The limit of a report's metadata in all; each session may have 64 KiB.
METADATA_CHARACTERS = 4 * 2**20
LEFT_OUT = {"tinsmith": f"left out: the metadata of one answer are limited to {METADATA_CHARACTERS} characters"}


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The facts about an event's session."""

    project_id: str | None
    user_metadata: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The events by hour. The events with the largest amounts come first.

    `sessions` maps the session IDs of all events to the facts about each session.
    """

    usage: Sequence[Usage]
    sessions: Mapping[str, SessionFacts]


class UsageReports:
    """Reports of usage and storage. Each tenant sees only its own usage."""

    def __init__(self, store: Store, clock: Clock = utc_now) -> None:
        self._store = store
        self._clock = clock

    async def between(self, tenant: str, start: datetime, end: datetime) -> UsageReport:
        """Return the report for a period.

        Raises Unprocessable for an invalid period, and for a period with too many rows.
        """
        start, end = self._checked(start, end)
        usage = await self._store.usage_between(tenant, start, end, MOST_ROWS + 1)
        if len(usage) > MOST_ROWS:
            raise Unprocessable(
                f"your usage has more than {MOST_ROWS} rows from {start:%Y-%m-%dT%H:%MZ} to {end:%Y-%m-%dT%H:%MZ}; "
                "request fewer hours at a time"
            )
        return UsageReport(usage, await self._facts_of(tenant, usage))

    async def stored(self, tenant: str, project_id: str | None) -> Sequence[StoredCheckpoints]:
        """Return the checkpoints that are stored now, by project."""
        return await self._store.stored_checkpoints(tenant, self._clock(), project_id)

    def _checked(self, start: datetime, end: datetime) -> tuple[datetime, datetime]:
        start, end = _utc_hour("starting_on", start), _utc_hour("ending_before", end)
        if not timedelta(0) < end - start <= LONGEST_WINDOW:
            raise Unprocessable(f"ending_before must be after starting_on, by {LONGEST_WINDOW.days} days at most")
        if start > self._clock():
            raise Unprocessable("starting_on is in the future")
        return start, end

    async def _facts_of(self, tenant: str, usage: Sequence[Usage]) -> dict[str, SessionFacts]:
        ids = iter(dict.fromkeys(one.session_id for one in usage if one.session_id))
        facts: dict[str, SessionFacts] = {}
        left = METADATA_CHARACTERS
        while some := tuple(islice(ids, SESSIONS_AT_ONCE)):
            for session in await self._store.sessions_by_id(tenant, some):
                metadata = _metadata_of(session)
                left -= sum(map(len, (*metadata.keys(), *metadata.values())))
                shown = metadata if left >= 0 else LEFT_OUT
                facts[session.session_id] = SessionFacts(session.project_id, shown or None)
        return facts


def _utc_hour(name: str, time: datetime) -> datetime:
    try:
        utc = None if time.tzinfo is None else time.astimezone(UTC)
    except OverflowError:  # the last day of the year 9999, west of Greenwich
        utc = None
    if utc is None or (utc.minute, utc.second, utc.microsecond) != (0, 0, 0):
        raise Unprocessable(f"{name} must be the start of a UTC hour, like 2026-07-13T00:00:00Z")
    return utc


def _metadata_of(session: Session) -> dict[str, str]:
    """Return the metadata as text values, because the SDK accepts no other values."""
    return {name: _text(value) for name, value in session.user_metadata.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
