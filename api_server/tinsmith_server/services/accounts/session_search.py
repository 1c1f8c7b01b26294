"""A tenant's sessions by what is known of them, newest first, a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from tinsmith_server.errors import NotFound
from tinsmith_server.services.accounts.tokens import tenant_urn
from tinsmith_server.store.records import Kept, Session
from tinsmith_server.store.store import Store
from tinsmith_server.wire.session_search import ClientFinishedQuery, SessionSearchRequest, StatusQuery, UserOwner

LOOKED_THROUGH = 1000
"""Sessions that one request looks at: what it has found until then is its page, and the next goes on behind it."""
AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class FoundSession:
    session: Session
    kept: Kept


@dataclass(frozen=True, slots=True)
class SearchPage:
    """`behind`: where the next one begins; None: nothing is left."""

    found: Sequence[FoundSession]
    behind: tuple[datetime, str] | None


class SessionSearch:
    """Reads; what it finds is the tenant's own, whoever is asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def search(self, tenant: str, request: SessionSearchRequest) -> SearchPage:
        if isinstance(request.owner, UserOwner) and tenant_urn(tenant) not in request.owner.owner_urns:
            return SearchPage((), None)
        found, behind = await self._matching(tenant, request)
        kept = await self._store.kept_of_sessions([session.session_id for session in found])
        return SearchPage([FoundSession(one, kept.get(one.session_id, Kept(0, 0))) for one in found], behind)

    async def _matching(
        self, tenant: str, request: SessionSearchRequest
    ) -> tuple[Sequence[Session], tuple[datetime, str] | None]:
        cursor = request.cursor
        behind = None if cursor is None else (cursor.last_created_at, cursor.last_session_id)
        found: list[Session] = []
        for _ in range(LOOKED_THROUGH // AT_ONCE):
            rows = await self._store.sessions_behind(tenant, behind, AT_ONCE)
            for session in rows:
                behind = session.created_at, session.session_id
                if matches(session, request):
                    found.append(session)
                    if len(found) == request.limit:
                        return found, behind
            if len(rows) < AT_ONCE:
                return found, None
        return found, behind

    async def assign_project(self, tenant: str, session_id: str, project_id: str) -> None:
        """Raises NotFound."""
        if not await self._store.assign_project(tenant, session_id, project_id):
            raise NotFound(f"there is no session {session_id}")


def matches(session: Session, request: SessionSearchRequest) -> bool:
    """All that is asked for holds; of an id and a name either one."""
    metadata = session.user_metadata
    return (
        _is_named(session, request)
        and (request.project_ids is None or session.project_id in request.project_ids)
        and all(metadata.get(key) == value for key, value in request.user_metadata.items())
        and (request.statuses is None or any(_has_status(session, status) for status in request.statuses))
    )


def _is_named(session: Session, request: SessionSearchRequest) -> bool:
    if request.session_id is None and request.display_name is None:
        return True
    if session.session_id == request.session_id:
        return True
    name = (session.display_name or "").casefold()
    return request.display_name is not None and all(word in name for word in request.display_name.casefold().split())


def _has_status(session: Session, status: StatusQuery | ClientFinishedQuery) -> bool:
    """One that was ended for its silence counts as cancelled. Sessions here do not fail: their models do."""
    if isinstance(status, StatusQuery):
        holds = {"active": session.finished_at is None, "cancelled": session.finish_type == "reaped", "failed": False}
        return holds[status.type]
    reported = session.finished_at is not None and session.finish_type != "reaped"
    return reported and (status.reasons is None or session.finish_type in status.reasons)
