"""Reports that are too long, storage in a report, and days outside of the calendar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.server.store_records import NOW
from tinsmith_server.errors import Unprocessable
from tinsmith_server.routes.usage import usage_events
from tinsmith_server.services.accounts.audit import AuditLog
from tinsmith_server.services.usage import reports
from tinsmith_server.services.usage.reports import UsageReports
from tinsmith_server.store.records import Usage

HOUR = NOW.replace(minute=0, second=0, microsecond=0)


class Rows:
    """Two hours of stored bytes: 1 GB and 2 GB."""

    async def usage_between(self, tenant: str, _start: object, _end: object, most: int) -> Sequence[Usage]:
        rows = [
            Usage(tenant, "", "tiny", HOUR + timedelta(hours=hours), "storage", (hours + 1) * 10**9 * 3600)
            for hours in range(2)
        ]
        return rows[:most]


USAGE = UsageReports(cast(Any, Rows()), lambda: NOW)


async def test_stored_bytes_are_reported_in_gigabyte_hours() -> None:
    services = cast(Any, SimpleNamespace(usage=USAGE))
    answer = await usage_events(HOUR, HOUR + timedelta(hours=2), "ada", services)
    events = [one["event_info"] for one in json.loads(bytes(answer.body))["data"]]
    assert [one["gigabyte_hours"] for one in events] == [1.0, 2.0]


async def test_a_report_of_too_many_rows_is_refused_with_what_to_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MOST_ROWS", 1)
    with pytest.raises(Unprocessable, match=r"more than 1 rows from 2026-03-01T12:00Z.*request fewer hours at a time"):
        await USAGE.between("ada", HOUR, HOUR + timedelta(hours=2))


async def test_the_last_day_of_the_calendar_has_no_audit_log() -> None:
    """The day ends after the last time that Python and the database know."""
    with pytest.raises(Unprocessable, match="the audit log has no day 9999-12-31"):
        await AuditLog(cast(Any, Rows())).of_day("ada", "all", date.max)
