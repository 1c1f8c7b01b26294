"""A search among more sessions than one request reads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

import pytest
from support.server.store_records import a_session, later
from tinsmith_server.services.accounts import sessions
from tinsmith_server.services.accounts.sessions import SessionSearch
from tinsmith_server.store.records import Session
from tinsmith_server.wire.search import SessionSearchRequest

ROWS = [a_session(f"session-{number}", created_at=later(-number)) for number in range(9)]


class Rows:
    """Nine sessions, newest first. It counts the sessions that were read."""

    read = 0

    async def sessions_after(self, _tenant: str, behind: tuple[datetime, str] | None, limit: int) -> Sequence[Session]:
        start = 0 if behind is None else [(one.created_at, one.session_id) for one in ROWS].index(behind) + 1
        self.read += len(ROWS[start : start + limit])
        return ROWS[start : start + limit]

    async def checkpoint_totals_of_sessions(self, _session_ids: object) -> dict[str, Any]:
        return {}


async def test_a_search_reads_a_bounded_number_of_sessions_and_continues_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rare session would otherwise cost one request all rows of its tenant."""
    monkeypatch.setattr(sessions, "LOOKED_THROUGH", 4)
    monkeypatch.setattr(sessions, "AT_ONCE", 2)
    rows = Rows()
    search = SessionSearch(cast(Any, rows))
    found: list[str] = []
    request = {"session_id": "session-7"}
    reads = []
    cursor = None
    while True:
        page = await search.search("ada", SessionSearchRequest.model_validate({**request, "cursor": cursor}))
        found += [one.session.session_id for one in page.found]
        reads.append(rows.read)
        if page.behind is None:
            break
        cursor = {"last_created_at": page.behind[0], "last_session_id": page.behind[1]}
    assert found == ["session-7"]
    assert reads == [4, 8, 9]
